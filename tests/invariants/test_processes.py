"""Invariant 5 for every objective: two processes, under DDP and with sharded weights, train what one trains."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import FEW, OBJECTIVES, STEP, config_of, sharded, trained
from ranks import run_script

SCRIPT = Path(__file__).parents[1] / "processes.py"

Results = dict[str, tuple[dict[str, torch.Tensor], list[dict[str, float]]]]


@pytest.fixture(scope="session")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """``of_two("ddp")``: the runs of many objectives on two processes, started once."""
    folder = tmp_path_factory.mktemp("two")
    started: set[str] = set()

    def run(kind: str) -> Results:
        if kind not in started:
            started.add(kind)
            if kind == "ddp":
                launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
                command = [*launcher, str(SCRIPT), kind, str(folder)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
                (folder / f"{kind}.log").write_text(done.stderr, encoding="utf-8")
            else:  # the same without the time that a launcher and its processes take to load the libraries
                with contextlib.suppress(AssertionError):
                    run_script(SCRIPT, [kind, folder], folder / f"{kind}.log")
        # A launch that failed is not tried again by every test.
        assert (folder / f"{kind}.pt").exists(), (folder / f"{kind}.log").read_text(encoding="utf-8")[-5000:]
        results: Results = torch.load(folder / f"{kind}.pt")
        return results

    return run


def compare(one: tuple[Any, Any], two: tuple[Any, Any]) -> None:
    assert one[0].keys() == two[0].keys()
    for name, value in one[0].items():
        assert (value - two[0][name]).abs().max() <= 1e-5, name
    assert len(one[1]) == len(two[1]) > 4
    for line, same in zip(one[1], two[1], strict=True):
        assert line == pytest.approx(same, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in OBJECTIVES]
)
def test_two_processes_train_what_one_trains(name: str, of_two: Callable[[str], Results], tmp_path: Path) -> None:
    compare(trained(name, tmp_path / "run", STEP), of_two("few" if name in FEW else "ddp")[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if config_of(name).target_grad != "ema"])
def test_sharded_weights_train_what_whole_ones_train(name: str, of_two: Callable[[str], Results]) -> None:
    compare(sharded(name, 1, 0), of_two("fsdp")[name])


@pytest.mark.slow
def test_no_two_objectives_train_the_same() -> None:
    """Each name stands for something: no option in the table is without effect."""
    weights = []
    for name in OBJECTIVES:
        state, lines = sharded(name, 1, 0)
        weights.append(torch.cat([value.flatten() for value in state.values()])[:900])
        # Weights may differ by rounding alone, where a term that is 0 in every step adds nothing.
        assert all(any(line[part] > 0 for line in lines) for part in lines[0]), name
    for index, value in enumerate(weights):
        for other in range(index):
            named = list(OBJECTIVES)[index], list(OBJECTIVES)[other]
            # Averaged targets and groups of records are the Trainer's; here they are as plain ones.
            if not any("averaged" in one or "grouped" in one for one in named):
                assert not torch.equal(value, weights[other]), named
