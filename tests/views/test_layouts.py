"""Which sequences a record becomes, and where they are read: written out by hand, and token by token."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.views.layouts import LAYOUTS, ReadoutOptions, layout, question_and_answer
from stepjepa.views.sequences import Pair, Readout, TokenizedRecord, TokenSequence, View

# The main text: template 0 1 2, question 3 to 6, template 7, steps 8 9 10 | 11 12 | 13 14, end of turn 15.
TEXT = np.arange(16, dtype=np.int32)
LABELS = np.arange(7, 15, dtype=np.int32)
PROMPT = np.arange(2, 6, dtype=np.int32)
PREDICTORS = np.array([90, 91, 92], np.int32)
NONE = PREDICTORS[:0]

QUESTION = View(TEXT, 3, 7, in_main=True)
STEPS = [View(TEXT, start, end, in_main=True) for start, end in ((8, 11), (11, 13), (13, 15))]
# Messages alone in the template: 50 51 question 52 53, and 60 answer 61.
ASKED = View(np.array([50, 51, 3, 4, 5, 6, 52, 53], np.int32), 2, 6)
ANSWER = View(np.array([60, *range(8, 15), 61], np.int32), 1, 8)
# A source's predictors are tokenised with its content.
ASKED_BEHIND = View(np.array([50, 51, 3, 4, 5, 6, 90, 91, 92, 52, 53], np.int32), 2, 9, predictors=3)
ASKED_FRONT = View(np.array([50, 51, 90, 91, 92, 3, 4, 5, 6, 52, 53], np.int32), 2, 9, predictors=3)
ANSWER_BEHIND = View(np.array([60, *range(8, 15), 90, 91, 92, 61], np.int32), 1, 11, predictors=3)

Read = tuple[list[int], int, int]
"""Token ids, and first and one past the last place that is averaged."""


def record(*pairs: tuple[View, View]) -> TokenizedRecord:
    return TokenizedRecord(TEXT, LABELS, PROMPT, tuple(Pair(*pair) for pair in pairs), line=5)


def read(sequences: list[TokenSequence], pair: int, kind: str) -> Read:
    """The sequence of a readout; there is one, and it has no labels."""
    ((sequence, readout),) = [
        (sequence, readout)
        for sequence in sequences
        for readout in sequence.readouts
        if (readout.pair, readout.kind) == (pair, kind)
    ]
    assert not len(sequence.labels)
    assert not len(sequence.text)
    assert sequence.start is None
    assert readout.end == len(sequence), "tokens behind the readout, which nothing reads"
    return sequence.ids.tolist(), readout.start, readout.end


MAIN = list(range(16))
ALONE, TEMPLATED = [50, 51, 3, 4, 5, 6], [60, *range(8, 15)]
BEHIND, FRONT = [*ALONE, 90, 91, 92], [50, 51, 90, 91, 92, 3, 4, 5, 6]
IN_TEXT, REVERSED = [*MAIN[:11], 90, 91, 92], [*TEMPLATED, 90, 91, 92]

# What it is, the two views, predictors, how they are read; what becomes of source and target.
CASES: list[tuple[str, View, View, Any, ReadoutOptions, Read, Read]] = [
    ("messages", ASKED_BEHIND, ANSWER, PREDICTORS, ReadoutOptions(), (BEHIND, 8, 9), (TEMPLATED, 7, 8)),
    ("in front", ASKED_FRONT, ANSWER, PREDICTORS, ReadoutOptions(front=True), (FRONT, 8, 9), (TEMPLATED, 7, 8)),
    ("reversed", ASKED, ANSWER_BEHIND, PREDICTORS, ReadoutOptions(reverse=True), (REVERSED, 10, 11), (ALONE, 5, 6)),
    (
        *("last token", ASKED_BEHIND, ANSWER, PREDICTORS, ReadoutOptions(last_token=-1)),
        *(([*BEHIND, 52, 53], 10, 11), ([*TEMPLATED, 61], 8, 9)),
    ),
    ("means", ASKED_BEHIND, ANSWER, PREDICTORS, ReadoutOptions(mean=True), (BEHIND, 6, 9), (TEMPLATED, 1, 8)),
    (
        *("means, in front", ASKED_FRONT, ANSWER, PREDICTORS, ReadoutOptions(front=True, mean=True)),
        *((FRONT, 5, 9), (TEMPLATED, 1, 8)),
    ),
    (
        *("means, reversed", ASKED, ANSWER_BEHIND, PREDICTORS, ReadoutOptions(reverse=True, mean=True)),
        *((REVERSED, 8, 11), (ALONE, 2, 6)),
    ),
    ("means, K 0", ASKED, ANSWER, NONE, ReadoutOptions(mean=True), (ALONE, 2, 6), (TEMPLATED, 1, 8)),
    (
        *("in the chat", QUESTION, ANSWER, PREDICTORS, ReadoutOptions()),
        *(([*MAIN[:7], 90, 91, 92], 9, 10), (TEMPLATED, 7, 8)),
    ),
    (
        *("in the chat, reversed", QUESTION, ANSWER_BEHIND, PREDICTORS, ReadoutOptions(reverse=True)),
        *((REVERSED, 10, 11), (MAIN[:7], 6, 7)),
    ),
    ("steps", STEPS[0], STEPS[1], PREDICTORS, ReadoutOptions(), (IN_TEXT, 13, 14), ([11, 12], 1, 2)),
    (
        *("steps, in front", STEPS[0], STEPS[1], PREDICTORS, ReadoutOptions(front=True)),
        *(([*MAIN[:8], 90, 91, 92, 8, 9, 10], 13, 14), ([11, 12], 1, 2)),
    ),
    (
        *("means of steps, in front", STEPS[0], STEPS[1], PREDICTORS, ReadoutOptions(front=True, mean=True)),
        *(([*MAIN[:8], 90, 91, 92, 8, 9, 10], 11, 14), ([11, 12], 0, 2)),
    ),
    (
        *("steps, reversed", STEPS[0], STEPS[1], PREDICTORS, ReadoutOptions(reverse=True)),
        *(([11, 12, 90, 91, 92], 4, 5), (MAIN[:11], 10, 11)),
    ),
    ("steps, K 0", STEPS[1], STEPS[2], NONE, ReadoutOptions(), (MAIN[:13], 12, 13), ([13, 14], 1, 2)),
    (
        *("steps, last", STEPS[0], STEPS[1], PREDICTORS, ReadoutOptions(last_token=-2)),
        *((IN_TEXT[:-1], 12, 13), ([11], 0, 1)),
    ),
]


@pytest.mark.parametrize(
    ("first", "second", "predictors", "reading", "source", "target"),
    [each[1:] for each in CASES],
    ids=[each[0] for each in CASES],
)
def test_views_beside_the_text(
    first: View, second: View, predictors: Any, reading: ReadoutOptions, source: Read, target: Read
) -> None:
    sequences = LAYOUTS["separate"].place(record((STEPS[1], STEPS[2]), (first, second)), predictors, reading)
    assert len(sequences) == 5
    assert read(sequences, 1, "source") == source
    assert read(sequences, 1, "target") == target
    assert sequences[0].ids.tolist() == MAIN
    assert not sequences[0].readouts


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_pairs_there_is_the_text(name: str) -> None:
    (result,) = LAYOUTS[name].place(record(), PREDICTORS, ReadoutOptions())
    assert result.ids.tolist() == result.text.tolist() == MAIN
    # Position and token behind it.
    assert result.labels.tolist() == [[place, place + 1] for place in range(7, 15)]
    assert result.prompt.tolist() == [[place, place + 1] for place in range(2, 6)]
    assert result.start is None or not result.start.any()


def test_a_readout_before_the_view_is_refused() -> None:
    with pytest.raises(UserError, match="`last_token -3` reaches before the start of a view; use a number nearer"):
        LAYOUTS["branched"].place(record((STEPS[0], STEPS[1])), PREDICTORS, ReadoutOptions(last_token=-3))


# -- inside the text ---------------------------------------------------------------------------------------------------


def slow_inplace(given: TokenizedRecord, predictors: Any) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Ids, starts, places of the text, labels: a token of the text at a time."""
    ids: list[int] = []
    start: list[int] = []
    text: list[int] = []
    for place, token in enumerate(given.ids.tolist()):
        for first, _ in given.pairs:
            if place == first.end:
                ids += predictors.tolist()
                start += [0] * len(predictors)
        text.append(len(ids))
        ids.append(token)
        hidden = [text[second.start] for _, second in given.pairs if second.start <= place < second.end]
        start.append(hidden[0] if hidden else 0)
    labels = [[text[place], int(given.ids[place + 1])] for place in given.labels.tolist()]
    return ids, start, text, labels


@pytest.mark.parametrize("predictors", [PREDICTORS, NONE], ids=["K 3", "K 0"])
@pytest.mark.parametrize("pairs", [[(0, 1)], [(1, 2)], [(0, 1), (1, 2)], [(0, 2)]])
@pytest.mark.parametrize("mean", [False, True])
def test_in_place(pairs: list[tuple[int, int]], predictors: Any, mean: bool) -> None:
    given = record(*((STEPS[first], STEPS[second]) for first, second in pairs))
    (result,) = LAYOUTS["inplace"].place(given, predictors, ReadoutOptions(mean=mean))
    ids, start, text, labels = slow_inplace(given, predictors)
    assert result.ids.tolist() == ids
    assert result.start is not None
    assert result.start.tolist() == start
    assert result.text.tolist() == text
    assert result.labels.tolist() == labels
    for number, (first, second) in enumerate(given.pairs):
        source_end, target_end = text[first.end - 1] + 1 + len(predictors), text[second.end - 1] + 1
        width = (len(predictors) or first.end - first.start) if mean else 1
        assert Readout(number, "source", source_end - width, source_end) in result.readouts
        width = second.end - second.start if mean else 1
        assert Readout(number, "target", target_end - width, target_end) in result.readouts
    assert len(result.readouts) == 2 * len(pairs)


# -- the register ------------------------------------------------------------------------------------------------------


def test_a_users_layout_is_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("main_only", "own_layout:main_only"):
        monkeypatch.setitem(LAYOUTS, name, LAYOUTS["separate"])  # taken out again in the end
        del LAYOUTS[name]
    monkeypatch.delitem(sys.modules, "own_layout", raising=False)  # it registers its layout when it is imported
    data = tmp_path / "data.jsonl"
    write_jsonl(data, [{"messages": record.messages} for record in tiny.records()])
    flags = ["train", "--train_file", str(data), "--model_name", "preset:tiny", "--output_dir", str(tmp_path / "run")]
    assert main([*flags, "--layout", "own_layout:main_only", "--dry_run", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    # Both views are beginnings of the main sequence.
    assert step["tokens"] * step["text_share"] <= step["plain_tokens"]
    assert main([*flags, "--layout", "own_layout:not_registered"]) == 2
    assert "put @stepjepa.layout(...) above the function" in capsys.readouterr().err
    assert main([*flags, "--layout", "own_layout:nothing"]) == 2
    assert "--layout: can't load 'own_layout:nothing'" in capsys.readouterr().err


def test_the_decorator_without_parentheses_says_what_to_write() -> None:
    """It was Python's TypeError of a missing argument."""
    decorate: Any = layout
    for function in (lambda record, predictors, reading: [], tiny.records):
        with pytest.raises(
            TypeError, match=r'^layout: expected a name and modes, @layout\("my_layout", .*, got function'
        ):
            decorate(function)
    with pytest.raises(TypeError, match=r"^layout: expected a function of record, predictors and reading, got str$"):
        decorate("nothing", ("llm-jepa",))("no function")
    with pytest.raises(ValueError, match=r"^modes: expected some of .*, in a tuple, got "):
        decorate("nothing")
    assert "nothing" not in LAYOUTS


CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
RESULT = {"role": "tool", "content": "5"}


def said(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content}


def test_a_question_is_paired_with_the_first_text_behind_its_tool_calls() -> None:
    asked, told, user, other = said("user", "2 + 3?"), said("assistant", "5"), said("user", "Sure?"), said("user", "1?")
    # Twice called, then answered; asked again, and answered at once.
    assert question_and_answer((asked, CALL, RESULT, CALL, RESULT, told, user, told)) == [(0, 5), (6, 7)]
    # Nothing but calls before the next question: the answer is the call itself, which gives no pair.
    assert question_and_answer((asked, CALL, RESULT, CALL, other, told)) == [(0, 1), (4, 5)]
    assert question_and_answer((asked, CALL)) == [(0, 1)]
    # A call that says something is the answer, as is an empty answer without a call.
    assert question_and_answer((asked, CALL | {"content": "Let me see."}, RESULT, told)) == [(0, 1)]
    assert question_and_answer((asked, said("assistant", " "), user, told)) == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("modes", "got"), [("llm-jepa", "'llm-jepa'"), (("step_jepa", "llm-jepa"), "'step_jepa'"), ((), r"\(\)")]
)
def test_modes_of_a_layout_are_a_tuple_of_known_ones(modes: Any, got: str) -> None:
    with pytest.raises(ValueError, match=f"modes: expected some of regular, llm-jepa, .*, got {got}"):
        layout("own", modes)
    assert "own" not in LAYOUTS
