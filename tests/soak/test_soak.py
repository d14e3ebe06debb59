"""Long tests on drawn cases: ``kill -9`` at random moments, damaged files.

The seed is printed and can be given (``SOAK_SEED``).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from defects import DEFECTS

import kills
from bad_inputs import make_run, try_config, try_data, try_run
from bad_runs import try_comparison, try_sweep
from bad_tables import try_table
from forked import Commands

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("SOAK_SEED") or time.strftime("%Y%m%d"))
STEPS, SIZE = 24, 6000
# By command: how often it is started, and how often each start is killed at most.
KILLS = {"train": (10, 4), "prepare": (5, 3), "evaluate": (6, 3), "export": (6, 3), "sweep": (3, 3)}


def sweep_case(material: Path) -> kills.Case:
    """A sweep of two trainings and two evaluations, in processes of its own."""
    training = {"model_name": str(material / "model"), "train_file": str(material / "train.jsonl"), "max_steps": 6}
    training |= {"batch_size": 2, "grad_accum": 2, "save_steps": 1, "logging_steps": 2, "use_cpu": True}
    grid = {
        "train": training,
        "evaluate": {"test_file": str(material / "test.jsonl"), "batch_size": 4, "max_new_tokens": 5},
        "arms": {"regular": {"regular": True}, "jepa": {"step_jepa": True}},
        "seeds": [5],
    }
    (material / "grid.yaml").write_text(yaml.safe_dump(grid))

    def sweep(folder: Path) -> list[object]:
        return ["sweep", "--config", material / "grid.yaml", "--output_dir", folder / "sweep", "--jobs", 2]

    patterns = ("*/seed*/model.safetensors", "*/seed*/test.*", "*/seed*/run.json", "*/seed*/metrics.jsonl")
    return kills.Case("sweep", sweep, sweep, tuple(f"sweep/{pattern}" for pattern in patterns))


def test_a_command_killed_at_random_moments_comes_to_the_same(
    commands: Commands, material: Path, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    trained = material / "undisturbed" / "run"
    arguments = ["train", *kills.train_flags(material, 6), "--output_dir", trained]
    assert commands.run(arguments, tmp_path / "trained.log", folder=trained) == 0
    for case in [*kills.cases(material, steps=STEPS, size=SIZE, trained=trained), sweep_case(material)]:
        whole, log = tmp_path / f"{case.name}-whole", tmp_path / f"{case.name}.log"
        start = time.monotonic()
        assert commands.run(case.first(whole), log, folder=whole) == 0, log.read_text()
        took = time.monotonic() - start
        expected, killed = case.results(whole), 0
        starts, most = KILLS[case.name]
        for number in range(starts):
            folder = tmp_path / f"{case.name}-{number}"
            given = case.first
            for _ in range(most):
                pid = commands.start(given(folder), log, folder=folder)
                if not commands.ended(chance.uniform(0, took)):
                    with contextlib.suppress(ProcessLookupError):  # it may end just now
                        os.kill(pid, signal.SIGKILL)
                if commands.status() == 0:
                    break
                killed += 1
                assert not kills.half_files(folder)
                if case.is_whole(folder, expected):
                    break
                given = case.again
            else:
                assert commands.run(given(folder), log, folder=folder) == 0, log.read_text()
            results = case.results(folder)
            assert results.keys() == expected.keys()
            for file, content in expected.items():
                assert results[file] == content, f"{case.name}, SOAK_SEED={SEED}: {file}"
        print(f"{case.name}: {killed} kills, SOAK_SEED={SEED}", flush=True)
        assert killed > starts // 2


def test_a_killed_run_that_is_moved_keeps_its_best_checkpoint(
    commands: Commands, material: Path, tmp_path: Path
) -> None:
    """Each start is killed once, then the folder is moved, and named from another working directory."""
    chance, log = random.Random(SEED), tmp_path / "log"
    best = "--load_best_model_at_end --metric_for_best_model lm_loss --greater_is_better true --eval_steps 1"
    flags = [*kills.train_flags(material, 7), "--eval_file", material / "test.jsonl", *best.split()]
    flags += ["--save_steps", 1]
    whole = tmp_path / "whole"
    assert commands.run(["train", *flags, "--output_dir", whole], log, folder=whole) == 0, log.read_text()
    expected = (whole / "model.safetensors").read_bytes()
    state = json.loads((whole / "checkpoint-7" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["best_global_step"] < 7
    for number in range(5):
        place = tmp_path / f"killed-{number}"
        (place / "inner").mkdir(parents=True)
        run = place / "run"
        step = chance.randint(max(state["best_global_step"], 2), 6)
        moment = {"folder": run, "when": run / f"checkpoint-{step}"}
        assert commands.run(["train", *flags, "--output_dir", run], log, **moment) == -signal.SIGKILL, log.read_text()
        moved = place / "moved"
        run.rename(moved)
        spelling = ("../moved", str(moved), f"../../{place.name}/moved")[number % 3]
        again = ["train", *flags, "--output_dir", spelling, "--resume_from_checkpoint", "last"]
        assert commands.run(again, log, folder=moved, directory=place / "inner") == 0, log.read_text()
        assert (moved / "model.safetensors").read_bytes() == expected, (number, SEED)


# Damaged files of each kind: how many, and how many of them are errors at least.
DAMAGE: dict[str, tuple[Callable[..., str], int, int]] = {
    "data files": (try_data, 1000, 500),
    "configurations": (try_config, 300, 150),
    "run folders": (try_run, 150, 50),
    "comparisons": (try_comparison, 1500, 700),
    "sweeps": (try_sweep, 200, 50),
    "tables": (try_table, 2000, 600),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_errors_of_one_line_or_counted(
    kind: str, trained_tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    attempt, count, errors = DAMAGE[kind]
    more = [make_run(tmp_path / "model", trained_tokenizer)] if kind == "run folders" else []
    result = Counter(attempt(capsys, tmp_path, *more, number, SEED) for number in range(count))
    assert result["error"] > errors, (SEED, result)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_package_is_noticed(name: str) -> None:
    damage, notices = DEFECTS[name]
    assert not notices()
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        assert notices(), name
