"""Locate run folders: named ones, and the finished trials of a sweep."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepjepa.base.counting import counted, listed
from stepjepa.base.errors import UserError, visible
from stepjepa.base.terminal import note, visible_lines
from stepjepa.base.typed_json import read_json
from stepjepa.store.folder import RUN_FILE, SUMMARY
from stepjepa.store.record import read_run
from stepjepa.study.sweep_place import SWEEP_FILE, is_sweep
from stepjepa.study.trial_record import FAILED, FINISHED, read_trial_record

# Most trials that a note names.
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class _SweepGrid:
    baseline: str


@dataclass(frozen=True, kw_only=True)
class _SweepTrial:
    name: str
    label: str
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
        for run in _finished_trials(folder) if is_sweep(folder) else [RunFolder(folder)]:
            if runs.setdefault(run.folder.resolve(), run) is not run:
                raise UserError("is named twice; leave it out once", path=run.folder)
    return list(runs.values())


def notes_on_missing_trials(folders: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return a sentence for each sweep with unfinished trials: :func:`find_run_folders` leaves them out.

    A seed that failed, or a whole arm, would otherwise be missing without a word.
    """
    notes = []
    for folder in filter(is_sweep, map(Path, folders)):
        sweep = _read_sweep(folder)
        missing = [trial for trial in sweep.trials if not _is_finished(folder, trial)]
        if missing:
            names = [f"{trial.name}{' (failed)' * _has_failed(folder, trial)}" for trial in missing]
            of_all = f"{len(missing)} of {counted(len(sweep.trials), 'trial')}"
            are = "is" if len(missing) == 1 else "are"
            notes.append(f"{folder}: {of_all} {are} not finished, and left out: {visible(listed(names, _NAMED))}")
    return notes


def without_waiting_trials(places: Sequence[RunFolder]) -> list[RunFolder]:
    """Leave out trials of sweeps that are trained and wait for their evaluation, with a note.

    A run that is named itself stays: without an evaluation it is an error where it is read.

    Raises:
        UserError: no run is left.
    """
    waiting = [place for place in places if place.arm is not None and not any(place.folder.glob(f"*{SUMMARY}"))]
    if waiting:
        names = visible_lines(", ".join(str(place.folder) for place in waiting))
        note(f"{names}: not evaluated yet, skipped")
    if waiting and len(waiting) == len(places):
        raise UserError(
            "none of its runs is evaluated yet; continue the sweep by its command", path=waiting[0].folder.parents[1]
        )
    return [place for place in places if place not in waiting]


def _read_sweep(folder: Path) -> _SweepFile:
    return read_json(_SweepFile, folder / SWEEP_FILE, "file of a sweep", "move it away and start the sweep again")


def _is_finished(folder: Path, trial: _SweepTrial) -> bool:
    """Return whether the training of a trial is finished."""
    run = folder / trial.name
    # A sweep file from another machine must not name folders outside of the sweep.
    inside = run.resolve().is_relative_to(folder.resolve())
    return inside and (run / RUN_FILE).is_file() and read_run(run).get("status") == FINISHED


def _has_failed(folder: Path, trial: _SweepTrial) -> bool:
    return read_trial_record(folder, trial.name).get("status") == FAILED


def _finished_trials(folder: Path) -> list[RunFolder]:
    """Return the run folders of the finished trials of a sweep; raise ``UserError`` if there is none."""
    sweep = _read_sweep(folder)
    finished = [
        RunFolder(folder / trial.name, trial.label, trial.arm == sweep.grid.baseline)
        for trial in sweep.trials
        if _is_finished(folder, trial)
    ]
    if not finished:
        raise UserError(
            "none of the trials of this sweep is finished; continue it by its command, or name run folders", path=folder
        )
    return finished


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name each run by its path below their common folder; last components repeat within a sweep.

    Trials of one arm of a sweep have its name, too: ``seed82`` alone says little.
    """
    paths = [folder.resolve() for folder in folders]
    parent = Path(os.path.commonpath([path.parent for path in paths]))
    parent = parent.parent if is_sweep(parent.parent) else parent
    return [str(path.relative_to(parent)) for path in paths]
