"""Reading records, and what is said where one is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepjepa.data.records import Record, as_records, parse_record
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.files import read_jsonl

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": ""}


def test_a_record_by_hand() -> None:
    record = parse_record({"messages": [SYSTEM, USER, ASSISTANT], "ground_truth": 7}, "data.jsonl", 3)
    assert record == Record((SYSTEM, USER, ASSISTANT), None, "data.jsonl", 3, {"ground_truth": 7})
    assert record.answer == "a"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "no 'messages', and none of the columns prompt"),
        ({"question": "q", "answer": ["a", "b"]}, "column 'answer' holds list; expected a text"),
        ({"messages": []}, "must be a list with at least one user and one assistant"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": ["hello", ASSISTANT]}, r"messages\[0\] is str, expected an object"),
        ({"messages": [{"content": "q"}, ASSISTANT]}, r"messages\[0\] has no 'role'"),
        ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\] has no 'content'"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\].content is NoneType"),
        ({"messages": [USER, {"role": "critic", "content": "x"}]}, "role is 'critic', expected one of system"),
        (
            {"messages": [USER, {"role": "assistant", "content": " \n"}]},
            r"messages\[1\].content \(assistant\) is empty",
        ),
        ({"messages": [{"role": "user", "content": ""}, ASSISTANT]}, r"content \(user\) is empty"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, "a system message that is not the first"),
        ({"messages": [USER]}, "no assistant message"),
        ({"messages": [SYSTEM, ASSISTANT]}, "no user message"),
        ({"messages": [USER, ASSISTANT, USER]}, "turns are user, assistant, user; expected"),
        ({"messages": [ASSISTANT, USER]}, "expected user and assistant in turn"),
        ({"messages": [USER, USER, ASSISTANT]}, "expected user and assistant in turn"),
        ({"messages": [USER, ASSISTANT], "text": "t"}, "explicit view 'text' stands alone"),
        ({"messages": [USER, ASSISTANT], "code": "t"}, "explicit view 'code' stands alone"),
        ({"messages": [USER, ASSISTANT], "text": 3, "code": "c"}, "'text' is int, expected a string or a list"),
        ({"messages": [USER, ASSISTANT], "text": [USER, USER], "code": "c"}, "'text' must hold exactly one user"),
        ({"messages": [USER, ASSISTANT], "text": "t", "code": [USER]}, "'code' must hold exactly one assistant"),
        ({"messages": [USER, ASSISTANT], "text": [{"role": "user"}], "code": "c"}, r"'text'\[0\].content must be"),
    ],
)
def test_errors_name_place_and_remedy(value: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_record(value, "data.jsonl", 5)
    assert str(caught.value).startswith("data.jsonl:5: ")


def test_reading_a_file(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    line = json.dumps({"messages": [USER, {"role": "assistant", "content": "ja – ö"}]}, ensure_ascii=False)
    file.write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    records = read_records(file)
    assert [record.line for record in records] == [1, 3]
    assert records[1].answer == "ja – ö"
    file.write_text(f"{line}\n" + '{"messages": []}\n', encoding="utf-8")
    with pytest.raises(UserError, match=rf"{file.name}:2: 'messages' must be"):
        read_records(file)
    file.write_text(f'{line}\n{{"messages": [\n', encoding="utf-8")
    with pytest.raises(UserError, match=rf"{file.name}:2"):
        read_records(file)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no records"):
        read_records(empty)
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        read_records(tmp_path / "missing.jsonl")


def test_records_from_memory() -> None:
    made = list(as_records([{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}]))
    assert [record.line for record in made] == [1, 2]
    assert list(as_records(made)) == made
    with pytest.raises(UserError, match="<memory>:2"):
        list(as_records([{"messages": [USER, ASSISTANT]}, {}]))


def test_half_a_character_is_refused_and_a_whole_one_written_as_two_is_not(tmp_path: Path) -> None:
    path = tmp_path / "halves.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00 \\\\ud83d"}\n{"a": "x\\uD83D"}\n', encoding="utf-8")
    rows = read_jsonl(path)
    assert next(rows) == (1, {"a": "😀 \\ud83d"})
    with pytest.raises(UserError, match=r"halves\.jsonl:2: holds half of a character"):
        next(rows)
