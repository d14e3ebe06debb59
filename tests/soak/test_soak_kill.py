"""Soak: ``kill -9`` at random moments, again and again, and every result is that of the undisturbed run.

The seed is printed and can be given (``SOAK_SEED``); the figures go to ``soak/kill.json``, or into ``SOAK_FIGURES``.
"""

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kills
from forked import Commands
from soak_figures import SEED, note

pytestmark = pytest.mark.slow

STEPS, SIZE = 24, 6000
# By command: how many kills there are to be, how often it is killed before it may end, how often it is begun at most.
PLAN = {
    "train": (28, 4, 20),
    "prepare": (10, 3, 10),
    "evaluate": (14, 3, 15),
    "export": (10, 3, 15),
    "sweep": (6, 3, 4),
}
LEAST = 50


def sweep_case(material: Path) -> kills.Case:
    """Two trainings and two evaluations, in processes of the sweep."""
    flags = {str(name)[2:]: value for name, value in _pairs(kills.train_flags(material, 6))}
    grid = {
        "train": {**flags, "save_steps": 1},
        "evaluate": {"test_file": str(material / "test.jsonl"), "batch_size": 4, "max_new_tokens": 5},
        "arms": {"regular": {"regular": True, "step_jepa": None, "jepa_ratio": None, "lbd": None}, "jepa": {}},
        "seeds": [5],
    }
    (material / "grid.yaml").write_text(yaml.safe_dump(grid))

    def sweep(folder: Path) -> list[object]:
        return ["sweep", "--config", material / "grid.yaml", "--output_dir", folder / "sweep", "--jobs", 2]

    patterns = ("*/seed*/model.safetensors", "*/seed*/test.*", "*/seed*/run.json", "*/seed*/metrics.jsonl")
    return kills.Case("sweep", sweep, sweep, tuple(f"sweep/{pattern}" for pattern in patterns))


def _pairs(arguments: list[Any]) -> Iterator[tuple[str, Any]]:
    words = [str(argument) for argument in arguments]
    for number, word in enumerate(words):
        if word.startswith("--"):
            value = words[number + 1] if number + 1 < len(words) else "--"
            yield word, True if value.startswith("--") else yaml.safe_load(value)


def _is_over(log: Path) -> bool:
    """Whether a command came to its end before its process did."""
    return log.exists() and re.search(r"^changes \d+$", log.read_text(), re.MULTILINE) is not None


def test_killed_at_random_moments_everything_comes_to_the_same(
    commands: Commands, trained_tokenizer: Any, tmp_path: Path
) -> None:
    print(f"\nkills: SOAK_SEED={SEED}", flush=True)
    chance, began = random.Random(SEED), time.monotonic()
    material = kills.make_material(tmp_path / "material", trained_tokenizer)
    trained = material / "undisturbed" / "run"
    trained.parent.mkdir()
    arguments = ["train", *kills.train_flags(material, 6), "--output_dir", trained]
    assert commands.run(arguments, tmp_path / "trained.log", folder=trained) == 0
    every = [*kills.cases(material, steps=STEPS, size=SIZE, trained=trained), sweep_case(material)]
    figures: dict[str, dict[str, int]] = {}
    for case in every:
        whole, log = tmp_path / f"{case.name}-whole", tmp_path / f"{case.name}-whole.log"
        whole.mkdir()
        start = time.monotonic()
        assert commands.run(case.first(whole), log, folder=whole) == 0, log.read_text()
        took = time.monotonic() - start
        expected = case.results(whole)
        enough, times, most = PLAN[case.name]
        figures[case.name] = {"compared": 0, "kills": 0, "ended_before": 0, "half_files": 0}
        while figures[case.name]["kills"] < enough and (number := figures[case.name]["compared"]) < most:
            folder, log = tmp_path / f"{case.name}-{number}", tmp_path / f"{case.name}-{number}.log"
            folder.mkdir()
            given = case.first
            for _ in range(times):
                pid = commands.start(given(folder), log, folder=folder)
                if commands.ended(chance.uniform(0, took)):
                    # The clock of a busy machine; what is over can't be killed.
                    assert commands.status() == 0, log.read_text()
                    figures[case.name]["ended_before"] += 1
                    break
                os.kill(pid, signal.SIGKILL)
                if commands.status() == 0 or _is_over(log):
                    # In this very moment, or it was only still leaving.
                    figures[case.name]["ended_before"] += 1
                    break
                figures[case.name]["kills"] += 1
                figures[case.name]["half_files"] += len(kills.half_files(folder))
                given = case.again
            else:
                assert commands.run(given(folder), log, folder=folder) == 0, log.read_text()
            assert not kills.half_files(folder)
            results = case.results(folder)
            assert results.keys() == expected.keys()
            for file, content in expected.items():
                assert results[file] == content, f"{case.name}, SOAK_SEED={SEED}: {file}"
            figures[case.name]["compared"] += 1
        print(f"kills: {case.name} {figures[case.name]}", flush=True)
    total = sum(figure["kills"] for figure in figures.values())
    seconds = round(time.monotonic() - began)
    note("kill", {"kills": total, "seconds": seconds, **figures})
    assert not any(figure["half_files"] for figure in figures.values())
    assert total >= LEAST
