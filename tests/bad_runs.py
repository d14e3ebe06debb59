"""Run folders, answers and sweeps of which one file is damaged, made from a seed; and commands on them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from bad_inputs import ODD_VALUES, attempt, damaged_text
from made_up_runs import make_run
from stepjepa.base.errors import UserError
from stepjepa.base.terminal import visible_lines
from stepjepa.study.grid import Trial
from stepjepa.study.run_report import report, report_text
from stepjepa.study.sweep import sweep
from stepjepa.study.sweep_folder import SweepFolder

DAMAGED = ("run.json", "test.summary.json", "test.jsonl")
"""What a comparison reads of a run folder."""

WORTHLESS: tuple[Any, ...] = (
    *(None, True, -1, 0, 7.5, 1e300, -1e300, float("nan"), float("inf"), "", "x" * 10**5, "7"),
    *([], {}, [None], {"mean": None}, "\x1b[2J\x07", "a\nb", "\u202eabc", "regular", *ODD_VALUES),
)


def _places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in inner for place in ((*above, key), *_places(each, (*above, key)))]


def damaged_json(chance: random.Random, text: bytes) -> bytes:
    """A JSON document, still one, in which one value is another, is missing, or has another name."""
    value = json.loads(text)
    *above, last = chance.choice(_places(value))
    holder = value
    for key in above:
        holder = holder[key]
    change = chance.randrange(6)
    if change == 0:
        del holder[last]
    elif change == 1 and isinstance(holder, dict):
        holder[chance.choice(["", "mean", "\x1b[31m", f"{last}_"])] = holder.pop(last)
    else:
        holder[last] = chance.choice(WORTHLESS)
    return json.dumps(value).encode()


def damage(chance: random.Random, file: Path) -> str:
    """Damage a file, JSON or JSON lines, for good; returns what was done."""
    before = file.read_bytes()
    kind = chance.choice(["value"] * 6 + ["text"] * 2 + ["empty", "missing", "folder", "binary"])
    if kind in ("missing", "folder"):
        file.unlink()
        if kind == "folder":
            file.mkdir()
        return kind
    if kind == "value":
        lines = before.splitlines() if file.suffix == ".jsonl" else [before]
        place = chance.randrange(len(lines))
        lines[place] = damaged_json(chance, lines[place])
        file.write_bytes(b"\n".join(lines) + b"\n")
    else:
        noise = chance.randbytes(chance.randrange(1, 500)) if kind == "binary" else b""
        file.write_bytes(damaged_text(chance, before) if kind == "text" else noise)
    return kind


def make_arms(folder: Path) -> list[Path]:
    """Two seeds of two arms, evaluated."""
    data = {"train": {"file": "train.jsonl", "records": 9, "sha256": "d" * 64}, "eval": None}
    about: dict[str, Any] = {"data": data, "lora": {"rank": 16, "alpha": None, "dropout": 0.0}, "flops": 3e12}
    about["loaded"] = {"dtype": "float32", "chat_template": "x"}
    return [
        make_run(folder / f"{mode}-{seed}", right, seed=seed, jepa={"mode": mode}, **about)
        for mode, right in (("regular", "10010"), ("step-jepa", "11010"))
        for seed in (3, 5)
    ]


def try_comparison(capsys: pytest.CaptureFixture[str], folder: Path, number: int, seed: int) -> str:
    """What ``report`` or ``compare`` makes of runs of which one is damaged; an error names the file or its folder."""
    chance = random.Random(f"comparison {seed} {number}")
    whole = folder / "whole"
    if not whole.exists():
        make_arms(whole)
    runs = folder / "runs"
    shutil.copytree(whole, runs)
    folders = sorted(runs.iterdir())
    file = chance.choice(folders) / DAMAGED[number % 3]
    kind = damage(chance, file)
    what = f"seed {seed}, comparison {number}, {kind} of {file.parent.name}/{file.name}"
    more = [["--json"], []] if number % 2 else [["--format", name] for name in ("text", "markdown", "json")]
    command = ["report" if number % 2 else "compare", *folders, *chance.choice(more)]
    ending, out, err = attempt(capsys, what, *command)
    assert visible_lines(out) == out, what
    if ending == "error":
        # Wrong values that are values still set a run apart from the others, of which any may be named.
        apart = ("can't be compared", "differ", "arm", "in one table")
        assert str(file.parent) in err or any(word in err for word in apart), f"{what}: {err}"
        assert any(mark in err for mark in (";", "in one table")), f"{what}: {err}"
    shutil.rmtree(runs)
    return ending


def try_sweep(capsys: pytest.CaptureFixture[str], folder: Path, number: int, seed: int) -> str:
    """What a sweep makes of a finished trial of which one file is damaged: ``error``, ``sound``, or ``again``."""
    chance = random.Random(f"sweep {seed} {number}")
    trials = [Trial(f"a/seed{seed}", "a", "a", seed, {"lbd": 1.0}, ("--task", "generic")) for seed in (3, 5)]
    place = SweepFolder(folder / "sweep", trials, {}, ("false",))
    for trial in trials:
        make_run(place.run_folder(trial), "10010", seed=trial.seed)
        place.record(trial, "finished", reason="none")
    run = place.run_folder(trials[1])
    file = (run.with_name(f"{run.name}.trial.json"), *(run / name for name in DAMAGED))[number % 4]
    what = f"seed {seed}, sweep {number}, {damage(chance, file)} of {file.name}"
    try:
        outcome = sweep(place, trials)
        if outcome.failed:
            return "again"
        shown = report_text(report([place.run_folder(each) for each in outcome.finished]))
        assert "seed3" in shown, what
    except UserError as error:
        assert str(folder) in str(error) or "in one table" in str(error), f"{what}: {error}"
        return "error"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        capsys.readouterr()
        shutil.rmtree(folder / "sweep")
    return "sound"
