"""Records to tokens: views, labels, prompts, limits and errors."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tiny
from stepjepa.base.errors import UserError
from stepjepa.batch.prepare import check_usable
from stepjepa.batch.tokenize import WITHOUT_PAIR, RecordTokenizer
from stepjepa.batch.view_text import step_views
from stepjepa.chat.special_tokens import add_predictor_tokens, predictor_ids
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.tokens import Piece, Tokens
from stepjepa.chat.turn_text import Turn
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.views.layouts import LAYOUTS, Layout
from stepjepa.views.sequences import TokenizedRecord

CHAT = tiny.make_record("You solve.", "why?", "first step\n\nsecond step", "and now?", "third\n\nfourth", line=7)
each_real = pytest.mark.parametrize("name", ["qwen2.5", "olmo2", "minimind"])


def make(tokenizer: Any, records: list[Record], **options: Any) -> list[TokenizedRecord]:
    return RecordTokenizer(tokenizer, JepaConfig(**{"max_length": 4096, **options})).tokenize(records)


def decode(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(list(map(int, ids)), clean_up_tokenization_spaces=False))


def after(record: TokenizedRecord, positions: Any) -> list[int]:
    """The tokens behind some positions."""
    return record.ids[np.asarray(positions) + 1].tolist()


# -- which parts are views ---------------------------------------------------------------------------------------------

STEPS = tiny.make_record("S", "q", "one\n\ntwo\n\nthree")


def pairs_of(tokenizer: Any, record: Record, **options: Any) -> list[tuple[tuple[str, bool], ...]]:
    """Of each pair what the views say, and whether they stand in the chat."""
    made = RecordTokenizer(tokenizer, JepaConfig(predictors=0, **options))
    result = made.pairs(record, made.turns(record))
    return [tuple((view.text.text[view.start : view.end], view.in_main) for view in pair[1:]) for pair in result]


def test_steps_predict_the_next(trained_tokenizer: Any) -> None:
    first, second, third = ("one\n\n", True), ("two\n\n", True), ("three", True)
    for options, expected in [
        ({}, [(first, second)]),
        ({"pairs": "all"}, [(first, second), (second, third)]),
        ({"pairs": "all", "pair_distance": 2}, [(first, third)]),
        ({"step_separator": "##"}, []),
    ]:
        assert pairs_of(trained_tokenizer, STEPS, mode="step-jepa", **options) == expected
    assert pairs_of(trained_tokenizer, STEPS, mode="regular") == []


@pytest.mark.parametrize("layout", ["separate", "branched"])
def test_questions_predict_answers_or_explicit_views_each_other(layout: str, trained_tokenizer: Any) -> None:
    options = {"mode": "llm-jepa", "layout": layout, "pairs": "all"}
    questions = [(text, layout == "branched") for text in ("why?", "and now?")]
    answers = [(CHAT.messages[index]["content"], False) for index in (2, 4)]
    pairs = list(zip(questions, answers, strict=True))
    assert pairs_of(trained_tokenizer, CHAT, **options) == pairs
    assert pairs_of(trained_tokenizer, CHAT, **{**options, "pairs": "first"}) == pairs[:1]
    record = tiny.make_record("S", "q", "a", text="T", code="C")
    assert pairs_of(trained_tokenizer, record, **options) == [(("T", False), ("C", False))]
    assert pairs_of(trained_tokenizer, tiny.make_record("S", "q", "a", text="T", code=" \n"), **options) == []


def test_a_layout_chooses_which_messages_are_a_pair(trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def previous_question(messages: Any) -> list[tuple[int, int]]:
        asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
        return list(zip(asked[1:], asked, strict=False))

    own = Layout("previous", ("llm-jepa",), place=LAYOUTS["separate"].place, partners=previous_question)
    monkeypatch.setitem(LAYOUTS, own.name, own)
    options = {"mode": "llm-jepa", "layout": own.name, "pairs": "all"}
    assert pairs_of(trained_tokenizer, CHAT, **options) == [(("and now?", False), ("why?", False))]
    (record,) = make(trained_tokenizer, [CHAT], predictors=0, **options)
    alone = ChatTemplate(trained_tokenizer).render_alone("user", "why?")
    assert decode(trained_tokenizer, record.pairs[0].second.ids) == alone.text


# -- labels, prompts, views as tokens ----------------------------------------------------------------------------------


@each_real
@pytest.mark.parametrize("labels", ["assistant", "all", "reference"])
def test_labels_are_the_assistants_words_and_prompts_the_users(
    name: str, labels: str, real_tokenizer: Callable[[str], Any]
) -> None:
    tokenizer = real_tokenizer(name)
    (record,) = make(tokenizer, [CHAT], mode="regular", labels=labels)
    # OLMo-2 has one token for the question mark and the template's line end.
    assert decode(tokenizer, after(record, record.prompt)).replace("\n", "") == "why?and now?"
    assert record.line == 7
    assert record.ids.dtype == record.labels.dtype == record.prompt.dtype == np.int32
    if labels == "assistant":
        turns = ChatTemplate(tokenizer).turns(CHAT.messages)
        assert decode(tokenizer, after(record, record.labels)) == "".join(each.text[each.answer :] for each in turns)
        assert decode(tokenizer, record.ids) == turns[-1].text


def test_all_and_reference_labels(trained_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(trained_tokenizer)
    (record,) = make(tokenizer, [CHAT], labels="all")
    assert record.labels.tolist() == list(range(len(record.ids) - 1))
    end = ChatTemplate(tokenizer).stop_ids[0]
    other = next(token for token in record.ids.tolist()[3:] if token != end)
    for pad, masked in [(None, tokenizer.eos_token_id), (end, end), (other, other)]:
        tokenizer.pad_token = None if pad is None else tokenizer.convert_ids_to_tokens(pad)
        (record,) = make(tokenizer, [CHAT], labels="reference")
        wanted = [place for place in range(len(record.ids) - 1) if record.ids[place + 1] != masked]
        assert record.labels.tolist() == wanted
        assert masked in record.ids.tolist()


@each_real
@pytest.mark.parametrize("front", [False, True])
def test_message_views_stand_alone_in_the_template(
    name: str, front: bool, real_tokenizer: Callable[[str], Any]
) -> None:
    tokenizer = real_tokenizer(name)
    (record,) = make(tokenizer, [CHAT], mode="llm-jepa", predictors=2, pairs="all", front_pred=front)
    template, added = ChatTemplate(tokenizer), predictor_ids(tokenizer, 2)
    for pair, question, answer in zip(record.pairs, (1, 3), (2, 4), strict=True):
        source, target = pair
        assert (source.in_main, source.predictors, target.predictors) == (False, 2, 0)
        content = CHAT.messages[question]["content"]
        own = source.content[2:] if front else source.content[:-2]
        assert decode(tokenizer, own).rstrip("\n") == content
        assert (source.content[:2] if front else source.content[-2:]).tolist() == added
        alone = template.render_alone("assistant", CHAT.messages[answer]["content"])
        assert decode(tokenizer, target.ids) == alone.text
        assert decode(tokenizer, target.content).strip() == CHAT.messages[answer]["content"]


def test_steps_are_views_in_the_main_text(trained_tokenizer: Any) -> None:
    (record,) = make(trained_tokenizer, [CHAT], mode="step-jepa")
    ((first, second),) = record.pairs
    assert first.ids is second.ids is record.ids
    assert first.in_main and second.in_main
    assert first.end == second.start
    assert decode(trained_tokenizer, first.content) == "third\n\n"
    assert decode(trained_tokenizer, second.content) == "fourth"
    maker = RecordTokenizer(trained_tokenizer, JepaConfig(mode="step-jepa"))
    turn = maker.turns(CHAT)[-1]
    for step, view in zip(step_views(turn, "blank"), (first, second), strict=True):
        assert step.place(maker._texts([turn.text], [turn.spans])[0]) == (view.start, view.end)


def test_a_token_that_reaches_into_the_next_step_belongs_to_the_one_in_which_it_begins() -> None:
    text = "one\n\n two"
    offsets = [(0, 3), (3, 6), (6, 9)]  # the blank line and the blank behind it are one token
    tokens = Tokens([Piece(np.arange(3, dtype=np.int32), offsets, len(text))])
    turn = Turn(0, text, 0, ((0, len(text)),), (0, 0), (), "")
    assert [step.place(tokens) for step in step_views(turn, "blank")] == [(0, 2), (2, 3)]


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["assistant", "all"])
def test_truncation_leaves_no_label_beyond_the_cut(labels: str, trained_tokenizer: Any) -> None:
    (whole,) = make(trained_tokenizer, [CHAT], mode="regular", labels=labels)
    first, last = ChatTemplate(trained_tokenizer).turns(CHAT.messages)
    first_end, second = (
        len(trained_tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in (first.text, last.text[: last.answer])
    )
    for limit in range(int(whole.labels[0]) + 2, len(whole.ids)):
        (cut,) = make(
            trained_tokenizer, [CHAT], mode="regular", labels=labels, max_length=limit, over_length="truncate"
        )
        assert cut.labels.tolist() == [place for place in whole.labels.tolist() if place + 1 < limit]
        # A turn of which nothing is left to learn is left out as a whole.
        length = limit if labels == "all" or cut.labels[-1] + 1 >= second else min(limit, first_end)
        assert cut.ids.tolist() == whole.ids[:length].tolist()
        assert cut.prompt.tolist() == [place for place in whole.prompt.tolist() if place + 1 < length]


def test_a_question_that_is_cut_has_no_prompt_label_beyond_the_cut(trained_tokenizer: Any) -> None:
    options: dict[str, Any] = {"mode": "regular", "labels": "all", "over_length": "truncate"}
    alone = tiny.make_record("S", "why is it so?", "so")
    (whole,) = make(trained_tokenizer, [alone], **options)
    for limit in range(2, len(whole.ids)):
        (cut,) = make(trained_tokenizer, [alone], max_length=limit, **options)
        assert cut.prompt.tolist() == [place for place in whole.prompt.tolist() if place + 1 < limit]


def test_over_length(trained_tokenizer: Any) -> None:
    (whole,) = make(trained_tokenizer, [CHAT], mode="step-jepa")
    length, short = len(whole.ids), tiny.make_record("S", "q", "a\n\nb")
    with pytest.raises(
        UserError, match=f":7: the record has {length} tokens, more than max_length {length - 1}; raise"
    ):
        make(trained_tokenizer, [short, CHAT], max_length=length - 1)
    assert len(make(trained_tokenizer, [CHAT], max_length=length)) == 1
    for over_length, wanted in [
        ("skip", {"turns": 2, "turns skipped": 1}),
        ("truncate", {"turns": 3, "truncated": 1}),
    ]:
        config = JepaConfig(mode="step-jepa", max_length=length - 2, over_length=over_length)  # type: ignore[arg-type]
        maker = RecordTokenizer(trained_tokenizer, config)
        assert len(maker.tokenize([short, CHAT])) == 2
        wanted |= {"records": 2, "pairs": 1, "over length": 1, "without a pair": 1, "pairs cut by truncation": 1}
        assert {name: count for name, count in maker.counts.items() if count} == wanted


@pytest.mark.parametrize("front", [False, True])
def test_predictor_tokens_do_not_count_towards_the_length_of_a_view(front: bool, trained_tokenizer: Any) -> None:
    """A pair of a record that is not too long is kept, however many predictor tokens stand beside its source."""
    tokenizer = copy.deepcopy(trained_tokenizer)
    add_predictor_tokens(tokenizer, 53)
    record = tiny.make_record("S", "why is it so, and not otherwise?", "so")
    options: dict[str, Any] = {"predictors": 53, "front_pred": front}
    (whole,) = make(tokenizer, [record], **options)
    ((source, _),) = whole.pairs
    limit = source.end - source.predictors
    assert (source.predictors, limit < len(whole.ids) < source.end) == (53, True)
    maker = RecordTokenizer(tokenizer, JepaConfig(max_length=len(whole.ids), **options))
    ((kept,),) = (tokenized.pairs for tokenized in maker.tokenize([record]))
    assert (kept.first.end, maker.counts["pairs cut by truncation"]) == (source.end, 0)


def test_truncation_that_leaves_nothing_to_learn_skips(trained_tokenizer: Any) -> None:
    (whole,) = make(trained_tokenizer, [CHAT], mode="regular")
    first = int(whole.labels[0])
    for limit, remaining in [(first + 1, 0), (first + 2, 1)]:
        result = make(trained_tokenizer, [CHAT], mode="regular", max_length=limit, over_length="truncate")
        assert len(result) == remaining


def test_required_pairs_name_the_line(trained_tokenizer: Any) -> None:
    lone = tiny.make_record("S", "q", "one step", line=3)
    assert make(trained_tokenizer, [lone], mode="step-jepa")[0].pairs == ()
    with pytest.raises(UserError, match=r":3: the record has no usable pair of views"):
        make(trained_tokenizer, [lone], mode="step-jepa", require_pairs=True)


def test_records_without_a_pair_are_counted_by_reason(trained_tokenizer: Any) -> None:
    fine = tiny.make_record("S", "q", "a")
    empty = tiny.make_record("S", "q", "<think>a</think>")
    maker = RecordTokenizer(trained_tokenizer, JepaConfig())
    maker.tokenize([fine])
    assert maker.without_pair is None and WITHOUT_PAIR not in maker.describe()
    maker.tokenize([empty])
    assert maker.without_pair == "1 of 2 records has no pair: the answer behind the first question is without text"
    maker.tokenize([tiny.make_record("S", "q", "a", views=[["", "a"]]), empty])
    assert maker.describe()[WITHOUT_PAIR] == (
        "3 of 4 records have no pair: the answer behind the first question is without text (2); "
        "one of its views is empty (1)"
    )
    maker = RecordTokenizer(trained_tokenizer, JepaConfig(mode="step-jepa"))
    maker.tokenize([fine])
    assert maker.without_pair == "1 of 1 records has no pair: the last answer has too few steps"


@pytest.mark.parametrize(
    ("answer", "settings", "reason", "remedy"),
    [
        ("One\nTwo", {}, "its lines are enough", "set `step_separator line`"),
        ("One\n\nTwo", {"step_separator": "##"}, "its paragraphs are enough", "set `step_separator blank`"),
        ("One\n\nTwo", {"pair_distance": 2}, "", "check `step_separator` and `max_length`"),
        ("<think>One\n\nTwo</think>Three", {}, "its thought has enough", "set `steps_from reasoning`"),
    ],
)
def test_an_answer_with_too_few_steps_is_told_which_setting_finds_them(
    trained_tokenizer: Any, answer: str, settings: dict[str, Any], reason: str, remedy: str
) -> None:
    fault = f"the last answer has too few steps{reason and f', {reason}'}"
    maker = RecordTokenizer(trained_tokenizer, JepaConfig(mode="step-jepa", **settings))
    maker.tokenize([tiny.make_record("S", "q", answer)])
    assert (maker.reasons_without_pair, maker.step_remedy) == (fault, remedy)
    with pytest.raises(UserError, match=re.escape(f"none of the 1 records has a pair ({fault}); {remedy}, or use")):
        check_usable(maker, "a.jsonl")
    if remedy.startswith("set"):
        name, value = remedy.split("`")[1].split()
        found = make(trained_tokenizer, [tiny.make_record("S", "q", answer)], mode="step-jepa", **{name: value})
        assert len(found[0].pairs) == 1


def test_a_call_of_a_tool_without_an_answer_in_words_gives_no_pair(trained_tokenizer: Any) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    user, result = {"role": "user", "content": "2 + 3?"}, {"role": "tool", "content": "5"}
    tokenizer = copy.deepcopy(trained_tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    maker = RecordTokenizer(tokenizer, JepaConfig())
    called, answered = maker.tokenize(
        [Record((user, call)), Record((user, call, result, {"role": "assistant", "content": "It is 5."}))]
    )
    assert not called.all_pairs and len(answered.all_pairs) == 1
    _, target = answered.all_pairs[0]
    assert tokenizer.decode(target.ids[target.start : target.end]) == "It is 5."
    reason = "the answer behind the first question is a tool call"
    assert maker.without_pair == f"1 of 2 records has no pair: {reason}"
