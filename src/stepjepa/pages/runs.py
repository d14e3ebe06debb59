"""Reads run folders: run.json, metrics.jsonl and evaluations. Damaged parts are noted, the others are shown."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.experiments.comparison import Comparison, compare
from stepjepa.experiments.evaluated_run import SUMMARY, is_of_another_model
from stepjepa.experiments.sweep_folder import SWEEP_FILE
from stepjepa.files import read_json_object, read_jsonl
from stepjepa.run_folder import METRICS_FILE, RUN_FILE, read_run


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation in a run folder.

    Attributes:
        name: as in ``--output_file NAME.jsonl``.
        summary: ``NAME.summary.json``; ``n``, ``headline``, ``lenient`` and ``scores`` are checked, and every score
            has a ``mean``, a ``low`` and a ``high`` (the last two may be None).
        answers: ``NAME.jsonl``; None where the file is gone.
    """

    name: str
    summary: dict[str, Any]
    answers: Path | None


@dataclass(frozen=True)
class RunFolder:
    """A run folder, with the arm of its sweep (None outside of sweeps) and whether that arm is the baseline."""

    folder: Path
    arm: str | None = None
    is_baseline: bool = False


@dataclass(frozen=True)
class Run(RunFolder):
    """A run folder that has been read.

    Attributes:
        name: differs from the names of the other runs; it comes from the user, so it must be escaped.
        run: ``run.json``; any part of it may be missing.
        metrics: the lines of ``metrics.jsonl``, each with a number as its ``step``.
        evaluations: by name.
        notes: what could not be read, one sentence each.
    """

    name: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def get(self, *path: str) -> Any:
        """The value at a path in ``run.json``, or None."""
        value: Any = self.run
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def uses_views(self) -> bool:
        """Whether the run aligned views of its records."""
        return self.get("jepa", "mode") not in (None, "regular")


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read run folders, finished or not; the folder of a sweep stands for its finished trials.

    Raises:
        UserError: a folder is no run, is named twice, or is a sweep without a finished trial.
    """
    found = find_run_folders(folders)
    names = run_names([each.folder for each in found])
    return [_read(each, name) for each, name in zip(found, names, strict=True)]


def find_run_folders(folders: Sequence[str | os.PathLike[str]]) -> list[RunFolder]:
    """Replace the folders of sweeps by those of their finished trials; errors as in :func:`read_runs`."""
    found = [each for folder in folders for each in _expand_sweep(Path(folder))]
    seen: set[Path] = set()
    for each in found:
        path = each.folder.resolve()
        if path in seen:
            raise UserError("is named twice; leave it out once", path=each.folder)
        seen.add(path)
    return found


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name each run by as many of the last parts of its path as tell all apart (``seed82`` alone says too little)."""
    parts = [folder.resolve().parts[1:] or ("/",) for folder in folders]
    fewest = 2 if any(each[-1].startswith("seed") for each in parts) else 1
    for count in range(fewest, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder.resolve()) for folder in folders]


def sweep_names(runs: Sequence[RunFolder]) -> tuple[list[str], str] | None:
    """The arms of the sweep that all the runs belong to, and its baseline; None if there is no such sweep."""
    names = list(dict.fromkeys(run.arm for run in runs))
    baselines = {run.arm for run in runs if run.is_baseline}
    if None in names or len(baselines) != 1:
        return None
    return [str(name) for name in names], str(baselines.pop())


def compare_folders(places: Sequence[RunFolder], baseline: str | None = None, **settings: Any) -> Comparison:
    """Compare runs under the names of the arms of their sweep, or by what differs between them.

    Args:
        places: the run folders.
        baseline: the arm to compare with; by default that of the sweep, or the regular one.
        settings: ``evaluation`` and ``tails`` of ``comparison.compare``.

    Raises:
        UserError: see ``comparison.compare``.
    """
    folders = [place.folder for place in places]
    if (known := sweep_names(places)) is not None:
        # Fails where several sweeps use one name for different arms, or several names for one.
        with suppress(UserError):
            return compare(folders, names=known[0], baseline=baseline or known[1], **settings)
    return compare(folders, baseline=baseline, **settings)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number: not a bool, and no integer too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _expand_sweep(folder: Path) -> list[RunFolder]:
    if (folder / RUN_FILE).is_file() or not (folder / SWEEP_FILE).is_file():
        return [RunFolder(folder)]
    sweep = read_json_object(folder / SWEEP_FILE, "file of a sweep", "restore it, or name the run folders")
    trials, grid = sweep.get("trials"), sweep.get("grid")
    baseline = grid.get("baseline") if isinstance(grid, dict) else None
    found = []
    for trial in trials if isinstance(trials, list) else []:
        name, arm, label = (trial.get(key) if isinstance(trial, dict) else None for key in ("name", "arm", "label"))
        run = folder / str(name)
        # A sweep file from another machine must not name folders outside of the sweep.
        inside = run.resolve().is_relative_to(folder.resolve())
        if inside and (run / RUN_FILE).is_file() and read_run(run).get("status") == "finished":
            label = label if isinstance(label, str) else None
            found.append(RunFolder(run, label, is_baseline=arm is not None and arm == baseline))
    if not found:
        raise UserError("none of the trials of this sweep is finished; go on with it, or name run folders", path=folder)
    return found


def _read(place: RunFolder, name: str) -> Run:
    run, notes = read_run(place.folder), list[str]()
    status, error = run.get("status"), run.get("error")
    if status != "finished":
        why = f": {error}" if isinstance(error, str) else ""
        notes.append(f"The run is not finished (status {status}{why}); the page shows it as far as it came.")
    metrics, evaluations = _read_metrics(place.folder, notes), _read_evaluations(place.folder, notes)
    return Run(place.folder, place.arm, place.is_baseline, name, run, metrics, evaluations, notes)


def _read_metrics(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not (folder / METRICS_FILE).is_file():
        notes.append(f"There is no {METRICS_FILE}, so nothing is shown over steps.")
        return []
    wrong: list[UserError] = []
    try:
        lines = [line for _, line in read_jsonl(folder / METRICS_FILE, wrong=wrong.append)]
    except UserError as error:
        notes.append(f"{METRICS_FILE} can't be read: {error}.")
        return []
    known = [line for line in lines if is_number(line.get("step"))]
    if lost := len(wrong) + len(lines) - len(known):
        notes.append(f"{lost} line{'s' if lost > 1 else ''} of {METRICS_FILE} can't be read.")
    return known


def _read_evaluations(folder: Path, notes: list[str]) -> dict[str, Evaluation]:
    found: dict[str, Evaluation] = {}
    for file in sorted(folder.glob(f"*{SUMMARY}")):
        name = file.name.removesuffix(SUMMARY)
        try:
            summary = read_json_object(file, "summary", "evaluate again")
        except UserError as error:
            notes.append(f"An evaluation is skipped: {error}.")
            continue
        if fault := _fault(summary):
            notes.append(f"The evaluation {file.name} is skipped: {fault}; evaluate again.")
            continue
        if is_of_another_model(folder, summary):
            notes.append(f"The evaluation {name} is of another model than the folder holds now; evaluate again.")
        answers = file.with_name(f"{name}.jsonl")
        if not answers.is_file():
            notes.append(f"The answers of the evaluation {name} ({answers.name}) are gone; its summary is shown.")
        found[name] = Evaluation(name, summary, answers if answers.is_file() else None)
    return found


def _fault(summary: dict[str, Any]) -> str | None:
    """What is wrong with a summary, or None; ends of intervals that are missing become None."""
    scores = summary.get("scores")
    if not isinstance(scores, dict) or not all(isinstance(each, dict) for each in scores.values()):
        return "it has no scores"
    for name, score in scores.items():
        score |= {end: score.get(end) for end in ("low", "high")}
        ends = [score[end] for end in ("low", "high") if score[end] is not None]
        if not all(map(is_number, [score.get("mean"), *ends])):
            return f"its score {name} is no number"
    for key in ("headline", "lenient"):
        if summary.get(key) not in list(scores):
            return f"it does not say which score is the {key}"
    return None if isinstance(summary.get("n"), int) and summary["n"] > 0 else "it does not say of how many examples"
