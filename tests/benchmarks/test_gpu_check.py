"""``python -m benchmarks.gpu`` runs: its small sizes on a CPU, three parts of it; and what its command line refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(*options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--device", "cpu", *options]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_three_parts_end_without_an_error(tmp_path: Path) -> None:
    run = check("--out", str(tmp_path), "--parts", "sync+micro+large")
    assert run.returncode == 0, run.stderr[-2000:]
    parts = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["parts"]
    assert sorted(parts) == ["large", "micro", "sync"]
    assert all(part["complete"] for part in parts.values())
    assert '"error"' not in json.dumps(parts)
    assert parts["large"]["branched, kept, autocast, varlen"]["median"] > 0
    measured = parts["micro"]["attention, 256 tokens of records of 64"]
    assert {"segments", "dense mask", "causal, no mask"} <= measured.keys()


@pytest.mark.slow
def test_a_part_that_is_none_is_refused(tmp_path: Path) -> None:
    run = check("--out", str(tmp_path / "out"), "--parts", "large,larger")
    assert (run.returncode, run.stderr.splitlines()[-1]) == (
        2,
        "python -m benchmarks.gpu: error: argument --parts: no part 'larger'; "
        "choose from correct, sync, micro, train, speed, large, tests",
    )
    assert not (tmp_path / "out").exists()
