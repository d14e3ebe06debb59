"""``stepjepa prepare chat``: any table of questions and answers becomes records that can be trained on."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from stepjepa.cli import main
from stepjepa.data.records import read_records

ROWS = [("lines with a digit", r".*\d.*"), ("two\nlines, quoted", "a,b"), ("how many?", 7)]


def table(path: Path, names: tuple[str, str], rows: list[tuple[object, object]] = ROWS) -> Path:
    """A table in the format that the path's ending says."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {name: [str(row[place]) for row in rows] for place, name in enumerate(names)}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as stream:
            csv.writer(stream, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([names, *rows])
    return path


def prepare(*flags: object) -> int:
    return main(["prepare", "chat", *map(str, flags)])


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("names", [("prompt", "completion"), ("Frage", "Antwort")])
def test_a_table_of_any_format_becomes_records(kind: str, names: tuple[str, str], tmp_path: Path, capsys) -> None:
    source = table(tmp_path / f"raw.{kind}", names)
    target = tmp_path / "train.jsonl"
    named = () if names[0] == "prompt" else ("--user", names[0], "--assistant", names[1])
    assert prepare("--input_file", source, "--output_file", target, "--system_prompt", "Go.", *named) == 0
    records = read_records(target)
    assert [[message["role"] for message in record.messages] for record in records] == [
        ["system", "user", "assistant"]
    ] * 3
    assert [tuple(message["content"] for message in record.messages) for record in records] == [
        ("Go.", question, str(answer)) for question, answer in ROWS
    ]
    assert "kept" in capsys.readouterr().out


def test_a_system_prompt_of_each_row(tmp_path: Path) -> None:
    source = tmp_path / "raw.csv"
    source.write_text("how,input,output\nShort.,a,b\nLong.,c,d\n")
    assert prepare("--input_file", source, "--output_file", tmp_path / "t.jsonl", "--system", "how") == 0
    assert [record.messages[0] for record in read_records(tmp_path / "t.jsonl")] == [
        {"role": "system", "content": "Short."},
        {"role": "system", "content": "Long."},
    ]


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("a,b\n1,2\n", (), r"raw.csv:2: none of the columns prompt, question.*name one with --user \(there is a, b\)"),
        ("prompt,b\n1,2\n", (), "name one with --assistant"),
        (
            "prompt,answer\n1,2\n",
            ("--user", "ask"),
            r"no column 'ask'; name one with --user \(there is prompt",
        ),
        ("prompt,answer\n1,\n", (), "raw.csv:2: column 'answer' is empty"),
        ("prompt,answer\n1,2\n", ("--system", "s", "--system_prompt", "t"), "leave one out"),
    ],
)
def test_what_is_wrong_is_named(text: str, flags: tuple[str, ...], said: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "raw.csv").write_text(text)
    assert prepare("--input_file", tmp_path / "raw.csv", "--output_file", tmp_path / "t.jsonl", *flags) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "t.jsonl").exists()


def test_empty_answers_may_be_left_out(tmp_path: Path, capsys) -> None:
    (tmp_path / "raw.csv").write_text("prompt,answer\n1,2\n3, \n5,6\n")
    flags = ("--input_file", tmp_path / "raw.csv", "--output_file", tmp_path / "t.jsonl", "--bad_records", "skip")
    assert prepare(*flags) == 0
    assert len(read_records(tmp_path / "t.jsonl")) == 2
    assert "raw.csv:3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "train.csv",
            "prompt,completion\n1,2\n",
            "is a table (.csv), not JSON lines; make records of it with",
        ),
        ("chats.json", ' [{"conversations": []}]', "or of worked solutions with 'prepare steps'"),
        ("chats.json", "\ufeff\n[\n{}]", "chats.json: is one JSON list, not JSON lines; make records of it with"),
        ("train.jsonl", '{"prompt": "a", "completion": "b"}\n', "run 'stepjepa prepare chat' first"),
        ("train.jsonl", '{"question": "a", "answer": "b"}\n', "'steps' or 'chat' first"),
    ],
)
def test_training_on_a_table_names_the_way(name: str, text: str, said: str, tmp_path: Path, capsys) -> None:
    (tmp_path / name).write_text(text)
    assert main(["inspect", "--train_file", str(tmp_path / name), "--model_name", "preset:tiny"]) == 2
    assert said in capsys.readouterr().err


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
        ({"prompt": "a", "completion": "b", "input": "not of Alpaca's form"}, [("user", "a"), ("assistant", "b")]),
    ],
)
def test_forms_of_other_tools(row: dict[str, object], turns: list[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text(json.dumps(row) + "\n")
    assert prepare("--input_file", tmp_path / "raw.jsonl", "--output_file", tmp_path / "t.jsonl") == 0
    (record,) = read_records(tmp_path / "t.jsonl")
    assert [(message["role"], message["content"]) for message in record.messages] == turns


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": "a"}, "raw.jsonl:1: column 'conversations' holds no list of turns"),
        ({"messages": [{"role": "user", "text": "a"}]}, "column 'messages' holds no list of turns"),
        ({"conversations": [{"from": "gpt", "value": "b"}]}, "raw.jsonl:1: 'messages' has no user message"),
        ({"instruction": "a", "input": 3.5, "output": None}, "column 'output' holds nothing"),
    ],
)
def test_a_damaged_chat_is_named(row: dict[str, object], said: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "raw.jsonl").write_text(json.dumps(row) + "\n")
    assert prepare("--input_file", tmp_path / "raw.jsonl", "--output_file", tmp_path / "t.jsonl") == 2
    assert said in capsys.readouterr().err
