"""Reading records and finding their steps: forms of other tools, and what is said where one is wrong."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepjepa.base.errors import UserError
from stepjepa.data.record import Record
from stepjepa.data.records import as_records, parse_record
from stepjepa.data.sources import read_records
from stepjepa.data.steps import closed_step, find_steps
from stepjepa.data.summarising import Summariser, records_fingerprint, system_prompts
from stepjepa.store.folder import PROMPTS_FILE
from stepjepa.store.prompts import share_trained_on, write_trained_prompts

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": ""}


def test_a_record_by_hand() -> None:
    record = parse_record({"messages": [SYSTEM, USER, ASSISTANT], "ground_truth": 7}, "data.jsonl", 3)
    assert record == Record((SYSTEM, USER, ASSISTANT), None, "data.jsonl", 3, {"ground_truth": 7})
    assert record.answer == "a"


SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, ["Add.\n\n1 and 2", "3"]),
        ({"instruction": "Add 1 and 2.", "input": "", "output": "3"}, ["Add 1 and 2.", "3"]),
        ({"conversations": SHAREGPT}, ["s", "q", "a"]),
        ({"messages": [USER, ASSISTANT], "prompt": "other"}, ["q", "a"]),
        ({"prompt": [{"role": "system", "content": "s"}, USER], "completion": "b"}, ["s", "q", "b"]),
        ({"question": "a", "answer": 7}, ["a", "7"]),
        ({"prompt": "a", "completion": "b", "input": "not of Alpaca's form"}, ["a", "b"]),
    ],
)
def test_forms_of_other_tools(row: dict[str, object], turns: list[str], tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text(json.dumps(row) + "\n")
    (record,) = read_records(tmp_path / "raw.jsonl")
    assert [message["content"] for message in record.messages] == turns
    assert [message["role"] for message in record.messages] == ["system", "user", "assistant"][-len(turns) :]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "no 'messages', and none of the columns prompt"),
        ({"question": "q", "answer": ["a", "b"]}, "column 'answer' is .*; expected a text; write one text there"),
        ({"instruction": "a", "input": 3.5, "output": None}, "column 'output' is 'None'; expected a text"),
        ({"conversations": "a"}, "'conversations' must be a list of messages"),
        ({"conversations": SHAREGPT[2:]}, "the turns are assistant; expected user and assistant in turn"),
        ({"messages": "hello"}, "'messages' must be a list of messages"),
        ({"messages": ["hello", ASSISTANT]}, r"messages\[0\] is 'hello'; expected 'role', one of system"),
        ({"messages": [{"content": "q"}, ASSISTANT]}, r"messages\[0\] is .*; expected 'role'"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            r"messages\[1\] .assistant. has no content; fill it in",
        ),
        ({"messages": [USER, {"role": ["critic"], "content": "x"}]}, r"messages\[1\] is .*critic.*; expected 'role'"),
        ({"messages": [USER, {"role": "tool", "content": "x"}, ASSISTANT]}, "the turns are user, tool, assistant"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, r"content \(assistant\) is empty"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, "the turns are user, system, assistant; .* only in front"),
        ({"messages": [USER]}, "the turns are user; expected user and assistant in turn"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "turns are user, assistant, assistant; expected"),
        ({"messages": [USER, ASSISTANT], "text": [USER, USER], "code": "c"}, "'text' must be .* exactly one user"),
        ({"messages": [USER, ASSISTANT], "text": "t", "code": [USER]}, "'code' must be .* exactly one assistant"),
        ({"messages": [USER, ASSISTANT], "views": ["x", "y"]}, "list of pairs of texts"),
        ({"question": "q", "answer": math.nan}, "column 'answer' is 'nan'; expected a text"),
    ],
)
def test_errors_name_place_and_field(value: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_record(value, "data.jsonl", 5)
    assert str(caught.value).startswith("data.jsonl:5: ")


def test_views_of_the_record() -> None:
    messages = [USER, ASSISTANT]
    assert parse_record({"messages": messages, "views": [["x", "y"], ["y", "z"]]}).views == (("x", "y"), ("y", "z"))
    assert parse_record({"messages": messages, "text": [USER], "code": "c"}).views == (("q", "c"),)


def test_reading_a_file(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    line = json.dumps({"messages": [USER, {"role": "assistant", "content": "ja – ö"}]}, ensure_ascii=False)
    file.write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    records = read_records(file)
    assert [(record.line, record.answer) for record in records] == [(1, "ja – ö"), (3, "ja – ö")]
    for wrong in ('{"messages": []}', '{"messages": ['):
        file.write_text(f"{line}\n{wrong}\n", encoding="utf-8")
        with pytest.raises(UserError, match=rf"{file.name}:2: "):
            read_records(file)
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no records"):
        read_records(file)
    with pytest.raises(UserError, match=r"missing\.jsonl: no such"):
        read_records(tmp_path / "missing.jsonl")


def test_records_from_memory() -> None:
    made = list(as_records([{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}]))
    assert [record.line for record in made] == [1, 2]
    assert list(as_records(made)) == made
    with pytest.raises(UserError, match="<memory>:2"):
        list(as_records([{"messages": [USER, ASSISTANT]}, {}]))


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"messages": [USER, ASSISTANT]}, "put a record by itself into a list"),
        ({"prompt": "a", "completion": "b"}, "put a record by itself into a list"),
        ({"prompt": ["a", "b"], "completion": ["c", "d"]}, "make rows of columns with datasets.Dataset.from_dict"),
        ({"train": [{"messages": [USER, ASSISTANT]}], "test": []}, "pass one of them"),
        ([{"input_ids": [1, 2], "labels": [1, 2]}], "'input_ids' are tokens, .*; pass the texts"),
        ([{"text": "alone"}], "bare text: write it as prompt and as completion, with .*plain=True, labels='all'"),
    ],
)
def test_what_holds_no_records_is_answered_by_what_to_pass(values: Any, remedy: str) -> None:
    """All but the sets had the remedy of sets, of two columns, or none."""
    with pytest.raises(UserError, match=remedy):
        list(as_records(values))


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_the_share_of_questions_that_were_trained_on(tmp_path: Path) -> None:
    def record(question: str, system: str | None = None) -> Record:
        before = () if system is None else ({"role": "system", "content": system},)
        return Record((*before, {"role": "user", "content": question}, ASSISTANT))

    trained = [record("What is 3 + 4?"), record("What is 2 + 5?", "Answer."), record("Why?", "")]
    assert system_prompts([*trained, trained[1]]) == ["Answer.", None, ""]
    read = Summariser()
    assert list(read.reading(trained)) == trained
    summary = read.summary
    assert summary.sha256 == records_fingerprint(trained) != records_fingerprint(trained[:2])
    assert summary.system_prompts == system_prompts(trained)
    write_trained_prompts(tmp_path, summary.questions)
    test = [record("What is 3 + 4?", "Other."), record("what is  2 + 5?"), record("What is 3 + 5?")]
    expected = {"exact": 1 / 3, "normalised": 2 / 3}
    assert share_trained_on(str(tmp_path), test) == expected
    assert share_trained_on(str(tmp_path / "checkpoint-5"), test) == expected
    assert share_trained_on(str(tmp_path / "other"), test) is None


def test_case_and_blanks_do_not_count_in_umlauts_line_ends_and_margins(tmp_path: Path) -> None:
    def record(*questions: str) -> Record:
        asked = [({"role": "user", "content": question}, ASSISTANT) for question in questions]
        return Record(tuple(message for pair in asked for message in pair))

    read = Summariser()
    assert list(read.reading([record("Größe\nÜBER 3?"), record("Wo?", "Und dort?")]))
    write_trained_prompts(tmp_path, read.summary.questions)
    same = [record("grösse über 3? "), record(" wo?", "UND DORT?")]
    assert share_trained_on(str(tmp_path), same) == {"exact": 0.0, "normalised": 1.0}
    assert share_trained_on(str(tmp_path), [record("Wo? Und dort?"), record("Größe über 4?")])["normalised"] == 0.0
    # A file of an earlier version, whose normalised question is another.
    trained = json.loads((tmp_path / PROMPTS_FILE).read_text(encoding="utf-8"))
    (tmp_path / PROMPTS_FILE).write_text(json.dumps(trained | {"normalised": []}), encoding="utf-8")
    earlier = share_trained_on(str(tmp_path), [record("Wo?", "Und dort?"), record("Wo?")])
    assert earlier == {"exact": 0.5, "normalised": 0.5}


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("one\n\ntwo\n\nthree", "blank", ["one\n\n", "two\n\n", "three"]),
        ("one\ntwo\n\nthree", "line", ["one\n", "two\n\n", "three"]),
        ("one \n \t\n two", "blank", ["one \n \t\n", " two"]),
        ("one\r\n\r\ntwo\r\n", "blank", ["one\r\n\r\n", "two\r\n"]),
        ("\n\none\n\ntwo", "blank", ["\n\none\n\n", "two"]),
        ("one\n\n  \n\n\t", "blank", ["one\n\n  \n\n\t"]),
        (" \n\n \n", "blank", []),
        ("one##two####three", "##", ["one##", "two####", "three"]),
        ("one## ##two", "##", ["one## ##", "two"]),
        ("## ##one##two", "##", ["## ##one##", "two"]),
        ("one\n\n\u00a0\n\ntwo", "blank", ["one\n\n\u00a0\n\n", "two"]),
        ("See:\n\n```py\na = 1\n\nb = 2\n```\n\ntwo", "blank", ["See:\n\n", "```py\na = 1\n\nb = 2\n```\n\n", "two"]),
        ("a\r\n\r\n~~~\r\nb\r\n\r\nc\r\n~~~\r\n\r\nd", "blank", ["a\r\n\r\n", "~~~\r\nb\r\n\r\nc\r\n~~~\r\n\r\n", "d"]),
        ("$$\nx\n\n= 3\n$$\n\n\n\ntwo", "blank", ["$$\nx\n\n= 3\n$$\n\n\n\n", "two"]),
        ("\\begin{align}\nx\n\ny\n\\end{align}\n\ntwo", "blank", ["\\begin{align}\nx\n\ny\n\\end{align}\n\n", "two"]),
        # A mark that nothing closes begins no block.
        ("one\n\n```\na\n\nb", "blank", ["one\n\n", "```\na\n\n", "b"]),
        ("$$ is money.\n\n\\[ too.\n\ntwo", "blank", ["$$ is money.\n\n", "\\[ too.\n\n", "two"]),
        # As published: every pair of line ends.
        ("```\na\n\nb\n```", "\n\n", ["```\na\n\n", "b\n```"]),
    ],
)
def test_steps_by_hand(text: str, separator: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in find_steps(text, separator)] == expected


def trying_each_start(text: str, separator: str) -> list[tuple[int, int]]:
    """As ``find_steps``, with expressions that try every blank as the first of a separator."""
    pattern = re.compile({"blank": r"(?:[ \t]*\r?\n){2,}", "line": r"(?:[ \t]*\r?\n)+"}.get(separator, "(?:#a)+"))
    cuts = [(0, 0), *(match.span() for match in pattern.finditer(text)), (len(text), len(text))]
    steps: list[tuple[int, int]] = []
    for (_, begin), (end, after) in itertools.pairwise(cuts):
        if text[begin:end].strip():
            steps.append((steps[-1][1] if steps else 0, after))
        elif steps:
            steps[-1] = (steps[-1][0], after)
    return steps


@given(st.text(alphabet=" \t\r\n\x0b\u2003x#a", max_size=40), st.sampled_from(["blank", "line", "#a"]))
@settings(max_examples=400, deadline=None)
def test_steps_equal_those_found_by_trying_each_start(text: str, separator: str) -> None:
    assert find_steps(text, separator) == trying_each_start(text, separator)


@pytest.mark.parametrize("separator", ["blank", "line"])
def test_a_long_run_of_blanks_is_gone_through_once(separator: str) -> None:
    """A million of them took hours, each being tried as the first of a separator."""
    text = "one" + " \t" * 500_000 + "two\n\nthree"
    assert find_steps(text, separator) == [(0, len(text) - 5), (len(text) - 5, len(text))]


@pytest.mark.parametrize(
    ("text", "separator", "closed"),
    [
        ("one", "blank", "one\n\n"),
        ("one\n", "blank", "one\n\n\n"),
        ("one\n\n", "blank", "one\n\n"),
        ("one", "line", "one\n"),
        ("one\n", "line", "one\n"),
        ("one", "##", "one##"),
        ("one##", "##", "one##"),
    ],
)
def test_a_step_is_closed_once(text: str, separator: str, closed: str) -> None:
    assert closed_step(text, separator) == closed
