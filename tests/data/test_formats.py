"""Rows as other tools keep them are records: whole chats, prompt and completion, instructions, columns of any name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stepjepa.data.records import parse_record
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (
            {"instruction": "Add.", "input": "1 and 2", "output": "3"},
            [("user", "Add.\n\n1 and 2"), ("assistant", "3")],
        ),
        ({"instruction": "Add 1 and 2.", "input": "", "output": "3"}, [("user", "Add 1 and 2."), ("assistant", "3")]),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                ]
            },
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "prompt": "other"},
            [("user", "a"), ("assistant", "b")],
        ),
        (
            {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "completion": "b"},
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        ({"question": "a", "answer": 7}, [("user", "a"), ("assistant", "7")]),
        ({"prompt": "a", "completion": "b", "input": "not of Alpaca's form"}, [("user", "a"), ("assistant", "b")]),
    ],
)
def test_forms_of_other_tools(row: dict[str, object], turns: list[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text(json.dumps(row) + "\n")
    (record,) = read_records(tmp_path / "raw.jsonl")
    assert [(message["role"], message["content"]) for message in record.messages] == turns


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": "a"}, "raw.jsonl:1: column 'conversations' holds no list of turns"),
        ({"conversations": [{"from": "gpt", "value": "b"}]}, "raw.jsonl:1: 'messages' has no user message"),
        ({"instruction": "a", "input": 3.5, "output": None}, "column 'output' holds nothing"),
    ],
)
def test_a_damaged_chat_is_named(row: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=re.escape(said)):
        read_records(tmp_path / "raw.jsonl")


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.json"])
def test_tables_are_read_with_columns_of_any_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    comma = "\t" if name.endswith("tsv") else ","
    text = f"Frage{comma}Antwort{comma}id\nhow many?{comma}7{comma}a\n"
    rows = [{"Frage": "how many?", "Antwort": 7, "id": "a"}]
    path.write_text(json.dumps(rows) if name.endswith("json") else text, encoding="utf-8")
    (record,) = read_records(path, columns=("Frage", "Antwort"))
    assert ([message["content"] for message in record.messages], record.extra) == (["how many?", "7"], {"id": "a"})
    with pytest.raises(UserError, match=r"none of the columns prompt.*\(there is Frage, Antwort, id\).*--columns"):
        read_records(path)


def test_a_record_may_bring_its_pairs_of_views() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = parse_record({"messages": messages, "views": [["x", "y"], ["y", "z"]]})
    assert record.views == (("x", "y"), ("y", "z"))
    with pytest.raises(UserError, match="list of pairs of texts"):
        parse_record({"messages": messages, "views": ["x", "y"]})
