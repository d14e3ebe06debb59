"""``stepjepa prepare chat``: any table of questions and answers becomes records that can be trained on."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from stepjepa.cli import main
from stepjepa.data.sources import read_records

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
    named = () if names[0] == "prompt" else ("--columns", *names)
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
        (
            "a,b\n1,2\n",
            (),
            r"raw.csv:2: no 'messages', and none of the columns prompt, question.*\(there is a, b\); name",
        ),
        ("prompt,b\n1,2\n", (), "none of the columns completion"),
        (
            "prompt,answer\n1,2\n",
            ("--columns", "ask", "answer"),
            r"no column 'ask' \(there is prompt, answer\); name the two with --columns",
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
