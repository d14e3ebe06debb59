"""Locate run folders: named ones, and the finished trials of a sweep."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepjepa.base.errors import UserError
from stepjepa.base.typed_json import read_json
from stepjepa.store.folder import RUN_FILE
from stepjepa.store.record import read_run

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class _SweepGrid:
    baseline: str


@dataclass(frozen=True, kw_only=True)
class _SweepTrial:
    name: str
    label: Any
    arm: str


@dataclass(frozen=True, kw_only=True)
class _SweepFile:
    """The fields of ``sweep.json`` that are read."""

    grid: _SweepGrid
    trials: list[_SweepTrial]


@dataclass(frozen=True)
class RunFolder:
    """A run folder, the arm of its sweep (None outside of sweeps), and whether that arm is the baseline."""

    folder: Path
    arm: str | None = None
    is_baseline: bool = False


def find_run_folders(folders: Sequence[str | os.PathLike[str]]) -> list[RunFolder]:
    """Return the run folders; the folder of a sweep is replaced by its finished trials.

    Raises:
        UserError: a sweep has no finished trial, or a run is named twice.
    """
    runs: dict[Path, RunFolder] = {}
    for folder in map(Path, folders):
        is_sweep = (folder / SWEEP_FILE).is_file() and not (folder / RUN_FILE).is_file()
        for run in _finished_trials(folder) if is_sweep else [RunFolder(folder)]:
            if runs.setdefault(run.folder.resolve(), run) is not run:
                raise UserError("is named twice; leave it out once", path=run.folder)
    return list(runs.values())


def _finished_trials(folder: Path) -> list[RunFolder]:
    """Return the run folders of the finished trials of a sweep; raise ``UserError`` if there is none."""
    sweep = read_json(_SweepFile, folder / SWEEP_FILE, "file of a sweep", "start the sweep again")
    finished = []
    for trial in sweep.trials:
        run = folder / trial.name
        # A sweep file from another machine must not name folders outside of the sweep.
        inside = run.resolve().is_relative_to(folder.resolve())
        if inside and (run / RUN_FILE).is_file() and read_run(run).get("status") == "finished":
            finished.append(RunFolder(run, str(trial.label), trial.arm == sweep.grid.baseline))
    if not finished:
        raise UserError(
            "none of the trials of this sweep is finished; continue it by its command, or name run folders", path=folder
        )
    return finished


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name each run by its path below their common folder; last components repeat within a sweep."""
    paths = [folder.resolve() for folder in folders]
    parent = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(parent)) for path in paths]
