"""``stepjepa estimate``: the figures of a dry run, and what devices make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.config.devices import DEVICES


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": record.messages} for record in tiny.records() * 7])
    return tmp_path / "data.jsonl"


def flags_of(data: Path, *more: object) -> list[str]:
    return ["--model_name", "preset:tiny", "--train_file", str(data), "--step_jepa", *map(str, more)]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main([*arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def told(capsys: pytest.CaptureFixture[str], data: Path, *more: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(printed(capsys, "estimate", *flags_of(data, *more), "--json"))
    return result


def test_it_says_what_a_dry_run_says(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated = printed(capsys, "estimate", *flags_of(data, "--gpus", 3)).splitlines()
    monkeypatch.setenv("WORLD_SIZE", "3")
    dry = printed(capsys, "train", *flags_of(data, "--output_dir", tmp_path / "run", "--dry_run")).splitlines()
    # What is free changes while the tests run.
    assert [line for line in estimated[:-1] if "free" not in line] == [line for line in dry if "free" not in line]
    assert estimated[-1] == "time: not estimated; name a --device, or its --peak_tflops"
    assert not (tmp_path / "run").exists()


def test_time_and_memory_of_a_device_by_hand(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = told(capsys, data, "--device", "h200", "--mfu", 0.5, "--gpus", 2)
    memory, device = result["memory"], DEVICES["h200"]
    assert memory["peak"] == sum(memory["parts"].values())
    assert result["device"] == {"bytes": device[1], "fits": True}
    assert result["time"]["step_seconds"] == pytest.approx(result["flops"]["step"] / (0.5 * device[0] * 2))
    assert result["time"]["run_seconds"] == pytest.approx(result["steps"] * result["time"]["step_seconds"])
    # A sample that stands for a larger data set, on a device of one's own.
    more = ("--records", 100_003, "--batch_size", 3, "--grad_accum", 5, "--num_epochs", 2)
    result = told(capsys, data, "--peak_tflops", 1, "--memory_gib", 0.001, *more)
    assert (result["device"]["fits"], result["time"]["peak"]) == (False, 1e12)
    assert result["steps_per_epoch"] == -(-100_003 // 15)
    assert result["steps"] == 2 * result["steps_per_epoch"]


WRONG = [
    (["--gpus", "0"], "--gpus: expected 1 or more, got 0"),
    (["--device", "h200", "--mfu", "1.5"], "--mfu: expected a share"),
    (["--device", "h2000"], "--device: expected one of a100, b200"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=[" ".join(flags) for flags, _ in WRONG])
def test_wrong_flags_are_one_line(flags: list[str], words: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *flags_of(data, *flags)]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1
