"""Soak: one of two or three processes comes to harm, and the run that goes on is the one that nobody disturbed.

Drawn faults on processes that nobody ends, and a few under torchrun itself. The seed is printed and can be given
(``SOAK_SEED``); the figures go to ``soak/ranks.json``, or into ``SOAK_FIGURES``.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

import kills
import ranks as ranks_file
from ranks import Fault, Ranks
from soak_figures import SEED, note

pytestmark = pytest.mark.slow

STEPS, RUNS = 8, 5
# Losses or batches of a whole run, and checkpoints.
MOST = {"loss": 2 * STEPS, "data": 2 * STEPS, "save": STEPS // 2}
KINDS = ["kill", "exit", "error", "memory"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    running = Ranks()
    yield running
    running.close()


def train(material: Path, run: Path) -> list[object]:
    return ["train", *kills.train_flags(material, STEPS), "--output_dir", run, "--resume_from_checkpoint", "auto"]


def test_drawn_faults(ranks: Ranks, material: Path, tmp_path: Path) -> None:
    print(f"\nranks: SOAK_SEED={SEED}", flush=True)
    chance, began = random.Random(SEED), time.monotonic()
    met: Counter[str] = Counter()
    longest = 0.0
    wholes: dict[int, Path] = {}
    for number in range(RUNS):
        world = chance.choice([2, 2, 3])
        if world not in wholes:
            whole = tmp_path / f"whole-{world}"
            ended, said = ranks.together(train(material, whole), tmp_path / "log", ranks=world)
            assert ended == [0] * world, said
            wholes[world] = whole
        run = tmp_path / str(number)
        for _ in range(3):
            where = chance.choice(["loss", "loss", "data", "save"])
            kind = "kill" if where == "save" else chance.choice(KINDS)
            fault = Fault(kind, chance.randrange(world), where, chance.randint(1, MOST[where]))
            start = time.monotonic()
            ended, said = ranks.together(train(material, run), tmp_path / "log", ranks=world, fault=fault)
            assert not kills.half_files(run), (SEED, fault)
            if ended == [0] * world:
                # There were not so many steps left.
                met["not met"] += 1
                break
            others = [status for rank, status in enumerate(ended) if rank != fault.rank]
            assert all(others), (SEED, fault, ended, said)
            longest = max(longest, time.monotonic() - start)
            met[f"{kind} in {where}"] += 1
        else:
            ended, said = ranks.together(train(material, run), tmp_path / "log", ranks=world)
            assert ended == [0] * world, (SEED, said)
        assert not kills.left_behind(run)
        found, expected = (load_file(folder / "model.safetensors") for folder in (run, wholes[world]))
        # What three add up depends on the order, and the first step of a start may have another one than later steps.
        most = 0.0 if world == 2 else 1e-4
        assert all((found[name] - expected[name]).abs().max() <= most for name in expected), (SEED, number, world)
    seconds = round(time.monotonic() - began)
    note("ranks", {"drawn": {"runs": RUNS, **met, "longest_launch": round(longest), "seconds": seconds}})


def torchrun(arguments: list[object], fault: Fault | None, log: Path, *flags: str) -> tuple[int, float]:
    """The exit status of a job of two processes, and after how many seconds it came."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    given = json.dumps(asdict(fault)) if fault else ""
    start = time.monotonic()
    with log.open("wb") as stream:
        done = subprocess.run(
            [*launcher, *flags, ranks_file.__file__, given, *map(str, arguments)],
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            timeout=400,
            check=False,
        )
    return done.returncode, time.monotonic() - start


def test_under_torchrun(ranks: Ranks, material: Path, tmp_path: Path) -> None:
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    ended, said = ranks.together(train(material, whole), log)
    assert ended == [0, 0], said
    expected = (whole / "model.safetensors").read_bytes()
    # torchrun starts all again by itself; ...
    code, restarted = torchrun(train(material, run), Fault("kill", 1, "loss", 11), log, "--max_restarts", "1")
    assert code == 0, log.read_text()
    assert "failed (exitcode: -9)" in log.read_text()
    assert (run / "model.safetensors").read_bytes() == expected
    # ... it ends all where it may not; ...
    run = tmp_path / "again"
    code, ended_by = torchrun(train(material, run), Fault("kill", 0, "loss", 11), log)
    assert code not in (0, -signal.SIGKILL), log.read_text()
    # ... and one that hangs is given up after --ddp_timeout, and killed by torchrun 30 seconds later.
    hanging = [*train(material, run), "--ddp_timeout", "60"]
    code, given_up = torchrun(hanging, Fault("hang", 1, "loss", 3), log)
    assert code not in (0, -signal.SIGKILL), log.read_text()
    assert "another process of this run has ended or does not answer" in log.read_text()
    ended, said = ranks.together(train(material, run), log)
    assert ended == [0, 0], said
    assert (run / "model.safetensors").read_bytes() == expected
    seconds = {"restarted": restarted, "ended": ended_by, "hanging given up": given_up}
    note("ranks", {"torchrun": {name: round(value) for name, value in seconds.items()}})
