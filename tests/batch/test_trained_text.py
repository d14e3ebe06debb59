"""What is trained of an example, as people see it before the first step; what several turns of a chat cost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import chat_templates
import served_forms
import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.batch.dataset import count_tokens
from stepjepa.batch.prepare import prepare
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.batch.trained_text import trained_text
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.data.sources import read_records
from stepjepa.running.first_screen import describe_template, describe_turns

CONFIG = JepaConfig(mode="regular")
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
ASKED = "<|im_start|>user⏎{}<|im_end|>⏎<|im_start|>assistant⏎"


def reasoned(turns: int, question: str = "{}?") -> Record:
    messages = []
    for number in range(turns):
        messages += [
            {"role": "user", "content": question.format(number)},
            {"role": "assistant", "content": f"{number}.", "reasoning_content": f"It is {number}."},
        ]
    return parse_record({"messages": messages}, "memory.jsonl", 1)


@pytest.fixture
def thinking(plain_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.chat_template = chat_templates.THINKING
    return tokenizer


def test_the_trained_part_of_each_turn_is_marked(plain_tokenizer: Any) -> None:
    (record,) = RecordTokenizer(plain_tokenizer, CONFIG).tokenize([tiny.make_record("", "a?", "b.", "c?", "d\ne")])
    first, second = ASKED.format("a?"), ASKED.format("c?")
    assert trained_text(record, plain_tokenizer) == f"{first}⟦b.<|im_end|>⟧⏎{second}⟦d⏎e<|im_end|>⟧"


def test_a_rewritten_chat_is_shown_turn_by_turn_and_cut(thinking: Any) -> None:
    made = RecordTokenizer(thinking, CONFIG)
    (record,) = made.tokenize([reasoned(5, "Which is number {}, please?")])
    first, second, third, more = trained_text(record, thinking).split(" / ")
    asked = ASKED.format("Which is number 0, please?")
    assert first == f"{asked}⟦<think>⏎It is 0.⏎</think>⏎⏎0.<|im_end|>⟧"
    assert second.startswith(f"{asked}0.<|im_end|>⏎")
    assert third.count(" … ") == 1
    assert third.endswith("⏎</think>⏎⏎2.<|im_end|>⟧")
    assert more == "and 2 more"


def test_tokens_of_turns_by_hand(thinking: Any, plain_tokenizer: Any) -> None:
    record = reasoned(3)
    for tokenizer, shares in ((thinking, False), (plain_tokenizer, True)):
        # ChatML writes no thoughts.
        plain = parse_record(
            {"messages": [{key: m[key] for key in ("role", "content")} for m in record.messages]}, "memory.jsonl", 1
        )
        chat = plain if shares else record
        made = RecordTokenizer(tokenizer, CONFIG)
        result = count_tokens(made.tokenize([chat]), CONFIG)
        rows = [made._texts([turn.text], [turn.own])[0].ids.tolist() for turn in made.turns(chat)]
        prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
        assert result["turns"] == sum(map(len, rows))
        assert result["tree"] == len(prefixes)
        assert result["chat"] == len(rows[-1])
        assert result["main"] == result["all"] == (len(rows[-1]) if shares else sum(map(len, rows)))


def test_the_factor_is_said_where_chats_have_several_turns(thinking: Any) -> None:
    prepared = prepare([reasoned(2), reasoned(1)], thinking, CONFIG)
    tokens = prepared.tokens
    message = describe_turns(prepared, shares=True)
    assert message is not None
    assert message.startswith("3 of 2 chats, each behind the prompt that a server sends: ")
    assert (
        f"{tokens['tree']:,} tokens, {tokens['tree'] / tokens['chat']:.2f} times those of one sequence per chat"
        in message
    )
    assert f"{tokens['tree'] / tokens['turns']:.0%} of those of one sequence per turn" in message
    assert f": {tokens['main']:,} tokens, " in str(describe_turns(prepared, shares=False))
    assert describe_turns(prepare([reasoned(1)], thinking, CONFIG), shares=True) is None


def test_the_first_screen(thinking: Any, tmp_path: Path, capsys: Any) -> None:
    """All that a reader must know of the text that is trained, from the shell."""
    thinking.save_pretrained(tmp_path / "base")
    tiny.make_model("llama").save_pretrained(tmp_path / "base")
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(reasoned(2).messages)}])
    flags = ["--model_name", tmp_path / "base", "--train_file", tmp_path / "data.jsonl", "--use_cpu", "--no_cache"]
    flags += ["--output_dir", tmp_path / "run", "--max_steps", "1", "--regular", "--save_strategy", "no"]
    assert main(["train", *map(str, flags)]) == 0
    output = capsys.readouterr().out
    assert "\nturns: 2 of 1 chats, each behind the prompt that a server sends: " in output
    assert f"\nexample: {ASKED.format('0?')}⟦<think>⏎It is 0.⏎</think>⏎⏎0.<|im_end|>⟧ / " in output
    assert "\nchat template: end of turn '<|im_end|>'\n" in output
    assert "not used" not in output


@pytest.mark.parametrize("command", ["train", "inspect", "verify", "evaluate"])
def test_tools_and_variables_that_a_template_does_not_read_are_said_once(
    command: str, plain_tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    plain_tokenizer.save_pretrained(tmp_path / "base")
    tiny.make_model("llama").save_pretrained(tmp_path / "base")
    rows = [{"messages": list(tiny.make_record("", "q", word).messages), "tools": [TOOL]} for word in ("a", "b")]
    rows[1]["chat_template_kwargs"] = {"thinkin": True}
    write_jsonl(tmp_path / "data.jsonl", rows)
    data, model = str(tmp_path / "data.jsonl"), str(tmp_path / "base")
    flags = ["--train_file", data, "--model_name", model, "--regular"]
    if command == "train":
        flags += ["--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--use_cpu", "--no_cache"]
    if command == "evaluate":
        flags = ["--test_file", data, "--model_path", model, "--output_file", str(tmp_path / "out.jsonl")]
        flags += ["--task", "generic", "--max_new_tokens", "2"]
    assert main([command, *flags]) == 0
    output = "".join(capsys.readouterr())
    tools, variable = "tools; the template writes none", "chat_template_kwargs.thinkin; the template does not read it"
    if command == "evaluate":
        assert output.count(f"not used: {tools}\n") == output.count(f"not used: {variable}\n") == 1
    else:
        assert output.count(f"not used: {tools}; {variable}\n") == 1
    assert output.count("not used: ") == (2 if command == "evaluate" else 1)


def test_what_the_saved_template_does_beside_the_own(plain_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokens = [*chat_templates.GEMMA_TOKENS, *chat_templates.LLAMA_TOKENS]
    tokenizer.add_special_tokens({"extra_special_tokens": tokens}, replace_extra_special_tokens=False)
    described = {}
    for name in ("GEMMA_LIKE", "LLAMA_LIKE", "HALF_TRIMMING"):
        tokenizer.chat_template = getattr(chat_templates, name)
        described[name] = describe_template(RecordTokenizer(tokenizer, CONFIG).describe())
    assert described == {
        "GEMMA_LIKE": "end of turn '<end_of_turn>'; system role no: put before the first user message",
        "LLAMA_LIKE": "end of turn '<|eot_id|>'; date pinned to 2024-07-26",
        "HALF_TRIMMING": "end of turn '<|im_end|>'; "
        "answer begins with '<|im_start|>assistant\\n' (written into the saved template)",
    }


@pytest.fixture(scope="module")
def with_markers(shared_data: Path) -> Any:
    """Qwen2.5's tokenizer with the markers of the forms below, whose template a test sets."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "qwen2.5")
    markers = ["<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>"]
    tokenizer.add_special_tokens({"extra_special_tokens": markers}, replace_extra_special_tokens=False)
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "reasoned", "over_chat", "over_turns"),
    # The figures of docs/templates.md.
    [("ChatML", False, 1.0, 0.41), ("Qwen3", False, 1.5, 0.61), ("Qwen3", True, 1.91, 0.66), ("GLM", False, 1.0, 0.41)],
)
def test_what_chats_of_four_turns_cost(
    form: str, reasoned: bool, over_chat: float, over_turns: float, with_markers: Any, shared_data: Path
) -> None:
    """GSM8K, four questions a chat, with Qwen2.5's tokenizer: tokens over one row a chat, and over a row a turn."""
    with_markers.chat_template = served_forms.FORMS[form].template
    source = read_records(shared_data / "llm_jepa" / "gsm8k_train.jsonl", limit=400)
    texts = [(record.messages[-2]["content"], record.answer) for record in source]
    chats = []
    for first in range(0, len(texts), 4):
        messages: list[dict[str, Any]] = []
        for question, solution in texts[first : first + 4]:
            thought, _, number = solution.rpartition("\n####")
            reasons = served_forms.with_thoughts(question, thought, number.strip())
            messages += reasons if reasoned else served_forms.chat(question, solution)
        chats.append(parse_record({"messages": messages}))
    config = JepaConfig(mode="regular", max_length=4096)
    result = count_tokens(RecordTokenizer(with_markers, config).tokenize(chats), config)
    assert result["tree"] / result["chat"] == pytest.approx(over_chat, abs=0.005)
    assert result["tree"] / result["turns"] == pytest.approx(over_turns, abs=0.005)
