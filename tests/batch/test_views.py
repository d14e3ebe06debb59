"""Which parts of a record are views, and which predicts which."""

from __future__ import annotations

import pytest

import tiny
from stepjepa.batch.views import MessageView, SpanView, find_pairs, step_views
from stepjepa.config import JepaConfig

STEPS = tiny.make_record("S", "q", "one\n\ntwo\n\nthree")
CHAT = tiny.make_record("S", "q1", "a1", "q22", "a22\n\nmore")


def test_steps_are_spans_of_the_last_answer() -> None:
    assert step_views(STEPS, "blank") == [SpanView(2, 0, 5), SpanView(2, 5, 10), SpanView(2, 10, 15)]
    assert step_views(CHAT, "blank") == [SpanView(4, 0, 5), SpanView(4, 5, 9)]


def test_step_pairs_are_consecutive() -> None:
    first, second, third = step_views(STEPS, "blank")
    assert find_pairs(STEPS, JepaConfig(mode="step-jepa")) == [(first, second)]
    assert find_pairs(STEPS, JepaConfig(mode="step-jepa", pairs="all")) == [(first, second), (second, third)]


def test_one_step_has_no_pair() -> None:
    assert find_pairs(tiny.make_record("S", "q", "one\n\n"), JepaConfig(mode="step-jepa", pairs="all")) == []
    assert find_pairs(STEPS, JepaConfig(mode="step-jepa", step_separator="##")) == []


@pytest.mark.parametrize("layout", ["separate", "branched"])
def test_llm_pairs_join_question_and_answer(layout: str) -> None:
    config = JepaConfig(mode="llm-jepa", layout=layout, pairs="all")  # type: ignore[arg-type]
    questions = (
        [MessageView("user", "q1"), MessageView("user", "q22")]
        if layout == "separate"
        else [SpanView(1, 0, 2), SpanView(3, 0, 3)]
    )
    answers = [MessageView("assistant", "a1"), MessageView("assistant", "a22\n\nmore")]
    pairs = list(zip(questions, answers, strict=True))
    assert find_pairs(CHAT, config) == pairs
    assert find_pairs(CHAT, JepaConfig(mode="llm-jepa", layout=layout)) == pairs[:1]  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["separate", "branched"])
def test_explicit_views_take_the_place_of_the_messages(layout: str) -> None:
    record = tiny.make_record("S", "q", "a", text="T", code="C")
    config = JepaConfig(mode="llm-jepa", layout=layout, pairs="all")  # type: ignore[arg-type]
    assert find_pairs(record, config) == [(MessageView("user", "T"), MessageView("assistant", "C"))]
    for text, code in [("", "C"), ("T", " \n")]:
        assert find_pairs(tiny.make_record("S", "q", "a", text=text, code=code), config) == []


def test_regular_has_no_pairs() -> None:
    assert find_pairs(STEPS, JepaConfig(mode="regular")) == []
