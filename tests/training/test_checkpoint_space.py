"""A run whose checkpoints do not fit on the disk is refused before its first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepjepa.cli import main
from stepjepa.run_folder import read_run


@pytest.mark.parametrize(
    ("flags", "kept"), [("--save_steps 2", 3), ("--save_steps 0.5", 2), ("--save_steps 1 --save_total_limit 5", 5)]
)
def test_both_numbers_and_the_remedy(
    flags: str, kept: int, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    data = ["--train_file", material / "train.jsonl", "--model_name", material / "model", "--max_length", 1024]
    run = ["--output_dir", tmp_path / "run", "--max_steps", 6, "--batch_size", 2, "--use_cpu", *flags.split()]
    command = [str(each) for each in ("train", *data, *run)]
    capsys.readouterr()
    assert main([*command, "--dry_run", "--json"]) == 0
    size = json.loads(capsys.readouterr().out)["checkpoint"]["bytes"]
    needed = kept * size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    assert main(command) == 2
    gib = 2**30
    assert f"{kept} checkpoints of {size / gib:.2f} GiB need {needed / gib:.2f} GiB" in capsys.readouterr().err
    assert not list(tmp_path.glob("run/checkpoint-*")) and read_status(tmp_path / "run") != "finished"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert main(command) == 0
    whole = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoint-6").glob("*.*"))
    assert size == pytest.approx(whole, rel=0.3)


def read_status(folder: Path) -> str | None:
    return str(read_run(folder)["status"]) if (folder / "run.json").is_file() else None
