"""``--columns``: tables as people have them go into every command that reads records."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from stepjepa.cli.main import main
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
    said = capsys.readouterr().out
    assert "columns: asked, said; line 2 is user 'How many?', assistant 'Ben has 2. So 2.'\n" in said
    assert read_run(run)["data"]["train"]["file"] == table.name
    for name, *flags in (("inspect", "--index", "1"), ("verify", "--max_records", "2")):
        assert main([str(each) for each in (name, *flags, *data, "--model_name", run)]) == 0
    score = ["evaluate", "--model_path", run, "--test_file", table, "--columns", "asked", "said", "--max_new_tokens", 3]
    assert main([str(each) for each in (*score, "--output_file", tmp_path / "out.jsonl")]) == 0


@pytest.mark.parametrize(("columns", "words"), [(("asked",), "expected two names"), (("asked", "no"), "no column")])
def test_columns_that_are_not_there(columns: tuple[str, ...], words: str, table: Path, capsys: Any) -> None:
    command = ["inspect", "--train_file", str(table), "--model_name", "preset:tiny", "--columns", *columns]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert words in error and f"{table}:2: " in error
