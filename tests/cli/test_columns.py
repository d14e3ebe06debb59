"""``--columns``: tables as people have them go into every command that reads records."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from stepjepa.base.errors import UserError
from stepjepa.cli.main import main
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.sources import read_records
from stepjepa.store.record import read_run

ROWS = [("How many?", "Ben has 2. So 2."), ("How far?", "Ann ran 5 miles. So 5."), ("How old?", "Tom is 7. So 7.")]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "data.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([("id", "asked", "said"), *((n, *row) for n, row in enumerate(ROWS))])
    return path


def test_a_table_is_trained_on_and_evaluated(table: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    data = ["--train_file", table, "--columns", "asked", "said"]
    flags = ["--model_name", "preset:tiny", "--use_cpu", "--batch_size", 3, "--save_strategy", "no"]
    assert main([str(each) for each in ("train", *data, "--output_dir", run, *flags)]) == 0
    output, notes = capsys.readouterr()
    assert "note: not used: id\n" in notes
    assert "columns: asked, said; line 2 is user 'How many?', assistant 'Ben has 2. So 2.'\n" in output
    assert read_run(run)["data"]["train"]["file"] == table.name
    for name, *flags in (("inspect", "--index", "1"), ("verify", "--max_records", "2")):
        assert main([str(each) for each in (name, *flags, *data, "--model_name", run)]) == 0
        notes = capsys.readouterr().err
        assert "note: not used: id\n" in notes and "note: columns: asked, said; line 2 is" in notes
    score = ["evaluate", "--model_path", run, "--test_file", table, "--columns", "asked", "said", "--max_new_tokens", 3]
    assert main([str(each) for each in (*score, "--output_file", tmp_path / "out.jsonl")]) == 0
    assert "note: not used: id\n" in capsys.readouterr().err


def test_every_other_command_names_what_it_does_not_use(tmp_path: Path, capsys: Any) -> None:
    rows = [{"question": f"{n}+{n}?", "answer": f"It is {2 * n}.", "source": "web", "gap": None} for n in range(3)]
    file, out = tmp_path / "a.jsonl", tmp_path / "o.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "p.jsonl"
    output.write_text("".join(json.dumps({"index": n, "generated": "1"}) + "\n" for n in range(3)))
    for command in (
        ("score", "--test_file", file, "--predictions", output, "--output_file", out, "--task", "generic"),
        (
            "train",
            "--train_file",
            file,
            "--model_name",
            "preset:tiny",
            "--regular",
            "--output_dir",
            tmp_path / "r",
            "--dry_run",
        ),
        ("prepare", "chat", "--input_file", file, "--output_file", tmp_path / "chat.jsonl"),
        ("prepare", "nq-open", "--input_file", file, "--output_file", tmp_path / "nq.jsonl"),
    ):
        assert main([str(each) for each in command]) == 0, command
        assert capsys.readouterr().err.count("note: not used: source\n") == 1, command


def test_a_chat_with_tools_goes_through_prepare(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    turns = [("human", "q"), ("function_call", json.dumps(call["function"])), ("observation", "r"), ("gpt", "a")]
    row = {"conversations": [{"from": name, "value": text} for name, text in turns], "system": "s"}
    more = {"tools": json.dumps([tool["function"]]), "chat_template_kwargs": {"enable_thinking": False}}
    file, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text(json.dumps(row | more) + "\n")
    assert main(["prepare", "chat", "--input_file", str(file), "--output_file", str(out)]) == 0
    (before,), (after,) = read_records(file), read_records(out)
    assert before.chat == after.chat and after.tools == [tool]
    assert after.chat_template_kwargs == {"enable_thinking": False}
    assert after.messages[2]["tool_calls"] == [call]


@pytest.mark.parametrize(("columns", "words"), [(("asked",), "expected two names"), (("asked", "no"), "no column")])
def test_columns_that_are_not_there(columns: tuple[str, ...], words: str, table: Path, capsys: Any) -> None:
    command = ["inspect", "--train_file", str(table), "--model_name", "preset:tiny", "--columns", *columns]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert words in error and f"{table}:2: " in error


@pytest.mark.parametrize("columns", ["asked,told", "asked told"])
def test_two_columns_in_one_text_are_written_apart(columns: str, table: Path, capsys: Any) -> None:
    assert main(["inspect", "--train_file", str(table), "--model_name", "preset:tiny", "--columns", columns]) == 2
    error = capsys.readouterr().err
    assert f"got '{columns}'; write two names: asked told, in a file and in Python ['asked', 'told']\n" in error
    with pytest.raises(UserError, match=rf"columns: expected two names, USER ASSISTANT, got '{columns}'; write two"):
        read_records(table, columns=columns)


@pytest.mark.parametrize("columns", [[], ["--columns", "question", "steps"]])
def test_a_list_of_steps_is_made_an_answer(columns: list[str], tmp_path: Path, capsys: Any) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text(json.dumps({"question": "q", "steps": ["One.", "Two."]}))
    assert main(["inspect", "--train_file", str(file), "--model_name", "preset:tiny", *columns]) == 2
    error = capsys.readouterr().err
    command = "stepjepa prepare steps --response_field steps"
    assert f" if 'steps' holds steps, {command} makes an answer of them" in error
    given = command.split()[1:]
    assert main([*given, "--input_file", str(file), "--output_file", str(out)]) == 0
    assert read_records(out)[0].answer == "One.\n\nTwo."


def test_bare_text_is_named_twice(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "Once upon a time"}))
    given = ["inspect", "--train_file", str(file), "--model_name", "preset:tiny"]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert ", or name it twice for bare text, with --columns text text, --plain, --train_all and --regular\n" in error
    assert main([*given, "--columns", "text", "text", "--plain", "--train_all", "--regular"]) == 0
    assert "Once" in capsys.readouterr().out


def test_a_folder_is_no_input_file(tmp_path: Path, capsys: Any) -> None:
    assert main(["prepare", "chat", "--input_file", str(tmp_path), "--output_file", str(tmp_path / "out.jsonl")]) == 2
    assert f"{tmp_path}: is a folder; name it as --dataset, or a file in it\n" in capsys.readouterr().err


def test_bare_texts_are_embedded_by_their_column(table: Path) -> None:
    bad = BadRecords(settings=("bad_records", "column"))
    with pytest.raises(
        UserError, match=r"said\); name the `column` of bare texts, or rename the two to prompt and completion$"
    ):
        read_records(table, bad=bad)
