"""Two processes decide alike on a step that one of them spoils."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harmful import CASES, made, trained

SCRIPT = Path(__file__).parents[1] / "harmful.py"


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (folder / "harmful.pt").exists(), done.stderr[-5000:]
    found: dict[str, Any] = torch.load(folder / "harmful.pt")
    return found


@pytest.mark.parametrize(("kind", "loss"), CASES)
def test_all_decide_alike(kind: str, loss: str, of_two: dict[str, Any], tmp_path: Path) -> None:
    state, skipped, said = of_two[f"{kind} {loss}"]
    assert skipped == 1
    rest = [record for record in made(12, []) if not 5 <= record.line <= 8]
    alone = trained(tmp_path, rest, kind, 2, on_nonfinite="stop", loss=loss)
    alone.train()
    for name, value in alone.model.state_dict().items():
        assert (value - state[name]).abs().max() <= 1e-5, name
    messages = [message for message, _ in said]
    assert [step for _, step in said] == [1, 1]
    assert all(message.startswith("step 2: ") for message in messages)
    assert all("memory.jsonl:6" in message for message in messages)
    assert len(set(messages)) == 1
