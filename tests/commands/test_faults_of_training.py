"""What a user sees of ``stepjepa train`` where numbers go wrong, and where records are too long."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa import cli
from stepjepa.files import write_jsonl
from stepjepa.objectives.text import LMLoss
from stepjepa.run_folder import read_run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    write_jsonl(path, [{"messages": list(record.messages)} for record in tiny.records() * 4])
    return path


def train(data: Path, folder: Path, *flags: str) -> int:
    fixed = (
        "--use_cpu --regular --no_cache --batch_size 3 --grad_accum 1 --num_epochs 1 --logging_steps 1 --save_steps 1"
    )
    command = f"train --model_name preset:tiny --train_file {data} --output_dir {folder} {fixed}"
    return cli.main([*command.split(), *flags])


def spoil(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the LM loss of one pass be NaN."""
    run, passes = LMLoss.__call__, 0

    def sum_up(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return run(*args) * (math.nan if passes == number else 1.0)

    monkeypatch.setattr(LMLoss, "__call__", sum_up)


def test_stopped_on_one_line_and_resumed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil(patch, 3)
        assert train(data, folder) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("stepjepa train: error: step 3: LM loss is nan, with ")
    assert f"{data}:" in error
    assert "checkpoint-2 is complete: resume with --resume_from_checkpoint last" in error
    run = read_run(folder)
    assert run["status"] == "failed"
    assert run["error"].startswith("step 3: LM loss is nan")
    # Without what went wrong it goes on, and with --on_nonfinite skip if it goes wrong again.
    with monkeypatch.context() as patch:
        spoil(patch, 2)
        assert train(data, folder, "--resume_from_checkpoint", "last", "--on_nonfinite", "skip") == 0
    run = read_run(folder)
    assert (run["status"], run["on_nonfinite"], run["results"]["nonfinite_steps"]) == ("finished", "skip", 1)
    assert run["results"]["steps"] == 4
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "lm_loss" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if line.get("nonfinite_steps")] == [4]


@pytest.mark.parametrize("word", ["drop", "truncate"])
def test_long_records_are_counted_in_both_files(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, long: int) -> Path:
        path = tmp_path / name
        texts = ["short"] * 3 + ["no end " * 99] * long
        write_jsonl(path, [{"messages": list(tiny.make_record("", "q", text).messages)} for text in texts])
        return path

    folder, held_out = tmp_path / "run", write("held.jsonl", 1)
    flags = ["--over_length", word, "--max_length", "64", "--eval_file", str(held_out), "--max_steps", "1"]
    assert train(write("train.jsonl", 2), folder, *flags) == 0
    said = capsys.readouterr().out
    run = read_run(folder)
    name = "truncated" if word == "truncate" else "skipped"
    assert (run["counts"][name], run["eval_counts"][name]) == (2, 1)
    assert f"2 over length, 2 {name}" in said
    assert f"1 over length, 1 {name}" in said
    assert "held out: " in said
    assert run["jepa"]["over_length"] == ("truncate" if word == "truncate" else "skip")
