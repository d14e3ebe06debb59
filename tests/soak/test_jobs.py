"""Trials of a sweep come to the same however many run side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tiny
from stepjepa.files import fingerprint, write_jsonl

pytestmark = pytest.mark.slow


def test_the_same_weights_and_answers_with_any_number_of_jobs(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    write_jsonl(data, [{"messages": list(record.messages)} for record in tiny.records() * 3])
    training = {"train_file": str(data), "model_name": "preset:tiny", "max_steps": 4, "use_cpu": True}
    grid = {
        "train": {**training, "batch_size": 2, "grad_accum": 1, "dataloader_num_workers": 1},
        "evaluate": {"test_file": str(data), "max_new_tokens": 4, "task": "generic"},
        "arms": {"step-jepa": {"step_jepa": True}},
        "seeds": [82, 23],
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid), encoding="utf-8")
    found = {}
    for jobs in ("1", "3"):
        command = ["sweep", "--config", "grid.yaml", "--output_dir", jobs, "--jobs", jobs, "--offline"]
        subprocess.run(
            [sys.executable, "-m", "stepjepa", *command],
            cwd=tmp_path,
            # A share of the cores would be another with other jobs, and sums over threads depend on how many there are.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=900,
        )
        folders = sorted(path for path in (tmp_path / jobs).glob("*/seed*") if path.is_dir())
        assert len(folders) == 4
        files = [file for folder in folders for file in (folder / "model.safetensors", *folder.glob("*.jsonl"))]
        files = [file for file in files if file.name != "metrics.jsonl"]  # it has seconds in it
        assert len(files) == 8
        found[jobs] = {str(file.relative_to(tmp_path / jobs)): fingerprint(file) for file in files}
    assert found["1"] == found["3"]
