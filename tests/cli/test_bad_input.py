"""A sample of the damaged files of ``tests/soak/test_soak.py``, and one of each that matters by itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bad_inputs import attempt, make_run, outcome, sound_lines, try_config, try_data, try_run
from bad_runs import try_comparison, try_sweep
from bad_tables import try_table
from stepjepa.data.sources import read_records

SEED = 7


def test_damaged_data_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {try_data(capsys, tmp_path, number, SEED) for number in range(36)}
    assert result == {"error", "skipped", "sound"}


def test_damaged_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "error" in {try_config(capsys, tmp_path, number, SEED) for number in range(12)}


def test_damaged_run_folders(trained_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "model", trained_tokenizer)
    assert "error" in {try_run(capsys, tmp_path, run, number, SEED) for number in range(10)}


@pytest.mark.slow
def test_damaged_evaluated_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {try_comparison(capsys, tmp_path, number, SEED) for number in range(120)} == {"error", "sound"}


@pytest.mark.slow
def test_damaged_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {try_sweep(capsys, tmp_path, number, SEED) for number in range(32)} == {"error", "again", "sound"}


@pytest.mark.slow
def test_damaged_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    assert {try_table(capsys, tmp_path, number, SEED) for number in range(120)} == {"error", "skipped", "sound"}


ROWS = {
    "rows.jsonl": '{"text": "q", "label": 1}\n{\n{"text": "q2", "label": 0}\n[]\n\n7\n"x"\n',
    "rows.json": '[{"text": "q", "label": 1}, 7, {"text": "q2", "label": 0}, [], null, ""]',
    "rows.csv": "text,label\nq,1\nq,1,2\nq2,0\nx\n1,2,3\n,,,\n",
}
BAD_LINES = {
    "rows.jsonl": ":2: not valid JSON",
    "rows.json": ": element 2 is '7'; expected an object",
    "rows.csv": ":3: 3 fields where the header has 2",
}


@pytest.mark.parametrize("name", ROWS)
def test_bad_rows_are_left_out_of_a_preparation_and_counted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / name, tmp_path / "out.jsonl"
    path.write_text(ROWS[name])
    given = ["prepare", "rotten-tomatoes", "--input_file", path, "--output_file", target]
    refused = attempt(capsys, name, *given)
    assert refused.outcome == "error"
    assert f"{path}{BAD_LINES[name]}" in refused.err
    assert not target.exists()
    result = attempt(capsys, name, *given, "--bad_records", "skip")
    assert result.outcome == "skipped"
    assert f"note: 4 bad lines skipped (--bad_records skip): {path}{BAD_LINES[name]}" in result.err
    assert "; and 1 more" in result.err
    assert "bad, skipped: 4\n" in result.out
    assert [record.messages[-2]["content"] for record in read_records(target)] == ["q", "q2"]


def test_bad_records_are_left_out_of_an_evaluation_and_counted(
    trained_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = make_run(tmp_path / "model", trained_tokenizer), tmp_path / "data.jsonl"
    data.write_bytes(b"null\n" + b"\n".join(sound_lines(random.Random(3), 2)))
    given = ["--model_path", model, "--test_file", data, "--output_file", tmp_path / "o.jsonl", "--max_new_tokens", 1]
    assert outcome(capsys, "asked", "evaluate", *given) == "error"
    assert outcome(capsys, "asked", "evaluate", *given, "--bad_records", "skip") == "skipped"
    summary = json.loads((tmp_path / "o.summary.json").read_text())
    assert (summary["n"], summary["left_out"]) == (2, {"bad record": 1})
