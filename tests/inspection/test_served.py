"""Check "served": a saved folder is asked as it was trained. Each fault that it was made for is put in, and noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import chat_templates
import served_forms
import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.chat import beginnings
from stepjepa.chat.renderer import Renderer
from stepjepa.chat.served import difference
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.tokens import TextTokenizer, TurnTokens
from stepjepa.chat.turn_ends import TurnEnds
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.run import RunConfig
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.inspection.served import _records_of_run, shown_turns
from stepjepa.inspection.verification import Subject, check_end_of_turn, check_pairs, check_served_folder, verify
from stepjepa.store.record import RunRecord

# A blank in front of an answer, which many tokenizers make one token with its first word.
WITH_BLANK = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def chat(*pairs: tuple[str, str], line: int = 1, **fields: Any) -> Record:
    messages = [{"role": role, "content": content} for role, content in pairs]
    return parse_record({"messages": messages, **fields}, "memory.jsonl", line)


TWO_TURNS = chat(("user", "a fish?"), ("assistant", "Cod."), ("user", "a bird?"), ("assistant", "Owl."))
THOUGHT = parse_record(
    {
        "messages": [
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": "5", "reasoning_content": "Two and three make five."},
            {"role": "user", "content": "And 1?"},
            {"role": "assistant", "content": "6", "thinking": "Five and one."},
        ]
    },
    "memory.jsonl",
    1,
)
CONTEXT = parse_record(
    {
        "messages": [
            {"role": "user", "content": "A planet?"},
            {"role": "assistant", "content": "The Moon.", "weight": 0},
            {"role": "user", "content": "No."},
            {"role": "assistant", "content": "Mars."},
        ]
    },
    "memory.jsonl",
    2,
)


@pytest.fixture
def subject(plain_tokenizer: Any) -> Callable[..., Subject]:
    """Makes what is verified, of a template and records."""

    def make(template: str | None, *records: Record, tokens: Sequence[str] = (), **settings: Any) -> Subject:
        tokenizer = copy.deepcopy(plain_tokenizer)
        tokenizer.add_special_tokens({"extra_special_tokens": [*tokens]}, replace_extra_special_tokens=False)
        tokenizer.chat_template = template or tokenizer.chat_template
        return Subject(tiny.make_model("llama"), tokenizer, JepaConfig(mode="regular", **settings), records)

    return make


def test_what_it_says(subject: Any) -> None:
    message = check_served_folder(subject(None, TWO_TURNS, CONTEXT))
    assert message.startswith("3 turns: their prompts are those of plain apply_chat_template, and generation stops at ")
    # The template's line end behind a turn is no label, and only in the middle of a chat a part of a prompt.
    assert message.endswith("'<|im_end|>'; behind them the template writes '\\n' (3 times), neither prompt nor trained")


def test_characters_that_the_tokenizer_does_not_know_are_said(subject: Any) -> None:
    made = subject(None, TWO_TURNS)
    (token,) = {index for turn in shown_turns(made.tokenized[0], 512) for index in turn.answer[-2:-1].tolist()}
    made.tokenizer.unk_token = made.tokenizer.convert_ids_to_tokens(token)  # the full stop of both answers
    message = check_served_folder(made)
    assert message.endswith("neither prompt nor trained; answers with characters that the tokenizer does not know: 2")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("template", "record", "tokens"),
    [
        (None, TWO_TURNS, ()),
        (WITH_BLANK, TWO_TURNS, ()),
        (chat_templates.THINKING, THOUGHT, ("<think>", "</think>")),
        (chat_templates.THINKING, chat(("user", "Hi"), ("assistant", "Ho"), tools=[TOOL]), ()),
        (chat_templates.LLAMA_LIKE, TWO_TURNS, chat_templates.LLAMA_TOKENS),
        (
            chat_templates.GEMMA_LIKE,
            chat(("system", "S"), ("user", "q"), ("assistant", "a")),
            chat_templates.GEMMA_TOKENS,
        ),
        (chat_templates.OPEN_ENDED, TWO_TURNS, ()),
        # NFD, which some tokenizers compose; special tokens that are text in an answer.
        (None, chat(("user", "Cafe\u0301?"), ("assistant", "cafe\u0301 <|im_start|> \n")), ()),
    ],
    ids=["ChatML", "blank", "thought", "tools", "Llama-3", "Gemma", "open end", "odd"],
)
def test_what_is_right_passes(template: str | None, record: Record, tokens: Sequence[str], subject: Any) -> None:
    result = {each["name"]: each for each in verify(subject(template, record, tokens=tokens))}
    assert result["served"]["passed"], result["served"]["detail"]
    assert result["end of turn is trained"]["passed"], result["end of turn is trained"]["detail"]


def test_a_cut_turn_is_compared_as_far_as_it_goes(subject: Any) -> None:
    whole = subject(None, TWO_TURNS)
    length = len(whole.tokenized[0].ids)
    assert check_served_folder(subject(None, TWO_TURNS, max_length=length - 1)).startswith("2 turns")
    # The second prompt fills all that is left.
    prompt = len(list(shown_turns(whole.tokenized[0], length))[1].prompt)
    assert check_served_folder(subject(None, TWO_TURNS, max_length=prompt)).startswith("1 turn:")
    with pytest.raises(ValueError, match="cuts every record in its prompt; raise it"):
        check_served_folder(subject(None, TWO_TURNS, max_length=5))


def test_what_length_does_to_records_is_no_fault_of_others(subject: Any) -> None:
    """A record of exactly max_length tokens is whole; one that is cut or left out is not compared."""
    length = len(subject(None, TWO_TURNS).tokenized[0].ids)
    exact = {each["name"]: each for each in verify(subject(None, TWO_TURNS, max_length=length))}
    assert all(each["passed"] for each in exact.values()), exact
    assert exact["end of turn is trained"]["detail"].startswith("1 record:")
    short = chat(("user", "q"), ("assistant", "a"), line=2)
    for over in ("truncate", "skip"):
        found = {
            each["name"]: each
            for each in verify(subject(None, TWO_TURNS, short, max_length=length - 1, over_length=over))
        }
        assert all(each["passed"] for each in found.values()), found
        assert found["data format"]["detail"].startswith("2 of 2 records")  # the first turn is short enough
        assert found["end of turn is trained"]["detail"].startswith("1 record:")
    # A template with several texts a record, of which the prompt of the second alone is too long.
    long = chat(("user", "Hi"), ("assistant", "Ho"), ("user", "go on " * 9), ("assistant", "No"))
    whole = subject(chat_templates.THINKING, long)
    first, second = whole.tokenized[0].texts
    limit = len(first.ids) + 1
    assert limit < int(second.labels[0])
    cut = verify(subject(chat_templates.THINKING, long, short, max_length=limit, over_length="truncate"))
    assert [each["detail"] for each in cut if not each["passed"]] == []


def test_records_that_training_refuses_for_their_length_fail(subject: Any) -> None:
    length = len(subject(None, TWO_TURNS).tokenized[0].ids)
    result = next(
        each for each in verify(subject(None, TWO_TURNS, max_length=length - 1)) if each["name"] == "data format"
    )
    assert not result["passed"]
    fault = f"training refuses 1 of 1 records (line 1: {length} tokens, more than max_length {length - 1}); raise"
    assert result["detail"].startswith(fault)


def test_an_answer_that_the_tokenizer_can_not_spell_is_said_and_passes(subject: Any) -> None:
    made = subject(None, TWO_TURNS, chat(("user", "q"), ("assistant", "Red"), line=2))
    turn = next(shown_turns(made.tokenized[0], 512))
    answer = turn.answer.copy()
    made.tokenizer.unk_token = made.tokenizer.convert_ids_to_tokens(int(answer[0]))
    made.tokenized[0].ids[len(turn.prompt) + 1] = answer[0]
    detail = check_end_of_turn(made)
    assert detail.startswith("2 records: ")
    assert detail.endswith("nothing else; not compared, for characters that the tokenizer does not know: 1")


def test_no_pair_is_said_with_its_reason(subject: Any) -> None:
    plain = chat(("user", "q"), ("assistant", "a"))
    made = Subject(subject(None, plain).model, subject(None, plain).tokenizer, JepaConfig(mode="step-jepa"), [plain])
    with pytest.raises(ValueError, match="1 of 1 records has no pair: the last answer has too few steps; check `step_"):
        check_pairs(made)
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    record = parse_record({"messages": asked, "tools": [TOOL]}, "memory.jsonl", 1)
    tokenizer = subject(None, plain).tokenizer
    tokenizer.chat_template = served_forms.QWEN3
    made = Subject(made.model, tokenizer, JepaConfig(), [record])
    with pytest.raises(ValueError, match=r"no pair: the answer behind the first question is a tool call$"):
        check_pairs(made)


def fails(subject: Subject, message: str) -> None:
    (result,) = (each for each in verify(subject) if each["name"] == "served")
    assert not result["passed"]
    assert message in result["detail"], result["detail"]


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_tokenised_with_its_answer(subject: Any, monkeypatch: Any) -> None:
    def together(self: TextTokenizer, given: Any) -> list[TurnTokens]:
        texts = self([turn.text for turn in given], [turn.own for turn in given])
        return [TurnTokens(text, text.first_overlapping(turn.answer)) for text, turn in zip(texts, given, strict=True)]

    monkeypatch.setattr(TextTokenizer, "turns", together)
    fails(
        subject(WITH_BLANK, chat(("user", "q"), ("assistant", "is"))),
        "line 1, message 2: plain apply_chat_template gives",
    )


@pytest.mark.parametrize(
    ("template", "tokens"),
    [
        (chat_templates.LLAMA_LIKE, chat_templates.LLAMA_TOKENS),  # the date of today
        (chat_templates.GEMMA_LIKE, chat_templates.GEMMA_TOKENS),  # refuses a system message
        (chat_templates.OPEN_ENDED, ()),  # no header for the answer
    ],
    ids=["date", "system", "header"],
)
def test_a_template_that_is_saved_as_it_came(template: str, tokens: Sequence[str], subject: Any) -> None:
    made = subject(template, chat(("system", "S"), ("user", "q"), ("assistant", "a")), tokens=tokens)
    made.tokenizer.chat_template = template
    fails(made, "line 1, message 3: plain apply_chat_template ")


def test_variables_of_the_run_that_are_not_saved(subject: Any) -> None:
    template = (
        chat_templates.THINKING.removesuffix("{% endif %}")
        + "{{- '<think>\n\n</think>\n\n' if quick is defined }}{% endif %}"
    )
    made = subject(template, TWO_TURNS, chat_template_kwargs={"quick": True})
    assert check_served_folder(made).startswith("2 turns")
    made.tokenizer.chat_template = template
    fails(made, "assistant\\n' instead of '")


def test_a_stop_token_that_is_not_saved(subject: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("stepjepa.models.generation_settings.add_stop_tokens", lambda model, ends: None)
    template = chat_templates.GEMMA_LIKE.replace("model", "assistant")
    fails(subject(template, TWO_TURNS, tokens=chat_templates.GEMMA_TOKENS), "lacks '<end_of_turn>'")


def test_an_end_of_turn_that_is_cut_off(subject: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(TurnEnds, "split", lambda self, text, end, role: (text[:end], self.tokens[0]))
    fails(subject(None, TWO_TURNS), "line 1, message 2: it is trained up to '.', at which generation does not stop")


def test_a_turn_with_weight_0_that_is_trained(subject: Any, monkeypatch: Any) -> None:
    remaining = ChatTemplate.turns

    def all_of_them(self: ChatTemplate, messages: Any, *rest: Any) -> Any:
        return remaining(self, [{**message, "weight": 1} for message in messages], *rest)

    monkeypatch.setattr(ChatTemplate, "turns", all_of_them)
    fails(subject(None, CONTEXT), "line 2: 2 turns are trained, its messages ask for 1")


def test_a_thought_that_is_left_out(subject: Any, monkeypatch: Any) -> None:
    remaining = ChatTemplate._normalised

    def without(self: ChatTemplate, message: Any) -> Any:
        return {key: text for key, text in remaining(self, message).items() if key != "reasoning_content"}

    monkeypatch.setattr(ChatTemplate, "_normalised", without)
    fails(
        subject(chat_templates.THINKING, THOUGHT),
        "line 1, message 2: 'reasoning_content' ('Two and three make five.') is not trained",
    )


def test_a_stop_token_that_stands_for_unknown_characters_hides_nothing(subject: Any, monkeypatch: Any) -> None:
    """As in GPT-2's tokenizer, and in many that were made from it."""
    test_a_thought_that_is_left_out(lambda *given: with_unknown(subject(*given), "<|im_end|>"), monkeypatch)


def with_unknown(made: Subject, token: str) -> Subject:
    made.tokenizer.unk_token = token
    return made


def test_tools_that_are_left_out(subject: Any, monkeypatch: Any) -> None:
    remaining = Renderer.render

    def without(self: Renderer, messages: Any, **options: Any) -> str:
        return remaining(self, messages, **options | {"tools": None})

    monkeypatch.setattr(Renderer, "render", without)
    fails(
        subject(chat_templates.THINKING, chat(("user", "Hi"), ("assistant", "Ho"), tools=[TOOL])),
        "gives '<|im_start|>system\\n[{",
    )


def test_tool_calls_that_are_left_out(subject: Any, monkeypatch: Any) -> None:
    """A template that writes no calls is refused; were it not, the check would notice."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "cod"}}}
    record = parse_record(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [call]}]},
        "memory.jsonl",
        1,
    )
    with pytest.raises(ValueError, match="writes no 'tool_calls'"):
        subject(None, record)
    located = beginnings.locate

    def without_calls(*given: Any, **options: Any) -> Any:
        return [place for place in located(*given, **options) if place.part.kind != "call"]

    monkeypatch.setattr(beginnings, "locate", without_calls)
    fails(subject(None, record), "'tool_calls' ('cod') is not trained")


def test_prompts_of_other_ids_and_the_same_text(plain_tokenizer: Any) -> None:
    ids = plain_tokenizer("Add.", add_special_tokens=False)["input_ids"]
    apart = [index for char in "Add." for index in plain_tokenizer(char, add_special_tokens=False)["input_ids"]]
    assert ids != apart
    assert difference(plain_tokenizer, ids, ids) is None
    assert f"'Add.' as {apart}" in str(difference(plain_tokenizer, ids, apart))
    assert "gives 'A' instead of 'Add.'" in str(difference(plain_tokenizer, apart[:1], apart))


def test_the_training_file_is_found_from_other_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path counts from the directory of the training; a file of that name here is another one."""
    run, there, here = tmp_path / "run", tmp_path / "there", tmp_path / "here"
    for folder in (run, there, here):
        folder.mkdir()
    (run / "run.yaml").write_text(RunConfig(train_file="train.jsonl").to_yaml())
    write_jsonl(there / "train.jsonl", [{"messages": list(TWO_TURNS.messages)}])
    monkeypatch.chdir(here)
    ((record,), source) = _records_of_run(run, RunRecord(directory=str(there)))
    assert (record.path, source) == (str(there / "train.jsonl"), "records of train.jsonl")
    # Moved to another machine, where it lies in the working directory.
    write_jsonl(here / "train.jsonl", [{"messages": list(TWO_TURNS.messages)}])
    assert _records_of_run(run, RunRecord(directory=str(there)))[0][0].path == str(there / "train.jsonl")
    assert _records_of_run(run, RunRecord(directory="/nowhere"))[0][0].path == "train.jsonl"
    assert _records_of_run(run / "none", RunRecord())[1] == "made-up chats, since the training file is not here"
