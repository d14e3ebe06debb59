"""What a report is made of: run folders, with what was logged and evaluated in them.

Only a folder that is no run ends a report. What else is missing or damaged is noted, and the rest is shown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.experiments.evaluated_run import SUMMARY
from stepjepa.experiments.sweep_folder import SWEEP_FILE
from stepjepa.files import read_json_object, read_jsonl
from stepjepa.run_folder import METRICS_FILE, RUN_FILE, read_run

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation in a run folder.

    Attributes:
        name: as in ``--output_file NAME.jsonl``.
        summary: ``NAME.summary.json``, with ``n``, ``headline``, ``lenient`` and ``scores`` checked: both name one of
            the scores, and each of those has a ``mean``, ``low`` and ``high`` (a number or None).
        answers: ``NAME.jsonl``, one line for each example, as ``stepjepa evaluate`` writes it; None where it is gone.
    """

    name: str
    summary: dict[str, Any]
    answers: Path | None


@dataclass(frozen=True)
class Run:
    """A run folder that has been read.

    Attributes:
        folder: where it is.
        name: tells it from the other runs of the page; the user's, so it is escaped like any text.
        run: ``run.json``; only the types of its first level are checked, and every part may be missing.
        metrics: the lines of ``metrics.jsonl`` in order, each with a ``step`` that is a number; empty where there are
            none.
        evaluations: by name, in the order of the names; empty where nothing was evaluated.
        notes: what could not be read, one sentence each, to be shown.
        arm: what the sweep that it is of calls runs that differ in nothing but their seeds; None of any other run.
        is_baseline: that sweep compares the others with this arm.
    """

    folder: Path
    name: str
    run: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    arm: str | None = None
    is_baseline: bool = False

    def get(self, *path: str) -> Any:
        """What stands at a place in ``run.json``; None where nothing does."""
        value: Any = self.run
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs of a report.

    Args:
        folders: run folders, whether finished or not, and folders of sweeps, which stand for their finished trials.

    Returns:
        In the order given; those of a sweep in the order of its grid.

    Raises:
        UserError: a folder is neither, is named twice, or is a sweep of which nothing is finished.
    """
    found = find_places(folders)
    names = run_names([each.folder for each in found])
    return [_read(each, name) for each, name in zip(found, names, strict=True)]


def run_folders(folders: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The run folders that are meant, see :func:`read_runs`."""
    return [each.folder for each in find_places(folders)]


def sweep_names(runs: Sequence[Place | Run]) -> tuple[list[str], str] | None:
    """What the sweep that runs are of calls its arms, in the order of their first runs, and its baseline.

    Returns:
        None where a run is of no sweep, or there is not one baseline among the arms.
    """
    names = list(dict.fromkeys(run.arm for run in runs))
    bases = list(dict.fromkeys(run.arm for run in runs if run.is_baseline))
    if None in names or len(bases) != 1:
        return None
    return [str(name) for name in names], str(bases[0])


def run_names(folders: Sequence[Path]) -> list[str]:
    """Names of runs: the last parts of their paths, as many as tell all of them apart.

    A folder ``seed82``, as sweeps make them, says too little alone.
    """
    parts = [folder.resolve().parts[1:] or ("/",) for folder in folders]
    fewest = 2 if any(each[-1].startswith("seed") for each in parts) else 1
    for count in range(fewest, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder.resolve()) for folder in folders]


@dataclass(frozen=True)
class Place:
    """A run folder that is meant; arm and baseline as in :class:`Run`."""

    folder: Path
    arm: str | None = None
    is_baseline: bool = False


def find_places(folders: Sequence[str | os.PathLike[str]]) -> list[Place]:
    """The run folders that are meant, with what a sweep knows of them, see :func:`read_runs`."""
    found = [place for folder in folders for place in _places(Path(folder))]
    seen: set[Path] = set()
    for place in found:
        if place.folder.resolve() in seen:
            raise UserError("is named twice; leave it out once", path=place.folder)
        seen.add(place.folder.resolve())
    return found


def _places(folder: Path) -> list[Place]:
    """The run folders that a folder stands for."""
    if (folder / RUN_FILE).is_file() or not (folder / SWEEP_FILE).is_file():
        return [Place(folder)]
    sweep = read_json_object(folder / SWEEP_FILE, "file of a sweep", "restore it, or name the run folders")
    trials, grid = sweep.get("trials"), sweep.get("grid")
    baseline = grid.get("baseline") if isinstance(grid, dict) else None
    found = []
    for trial in trials if isinstance(trials, list) else []:
        name, arm, label = (trial.get(key) if isinstance(trial, dict) else None for key in ("name", "arm", "label"))
        run = folder / str(name)
        # A sweep that came from elsewhere must not name other folders of this machine.
        inside = run.resolve().is_relative_to(folder.resolve())
        if inside and (run / RUN_FILE).is_file() and read_run(run).get("status") == "finished":
            found.append(Place(run, label if isinstance(label, str) else None, arm is not None and arm == baseline))
    if not found:
        raise UserError("none of the trials of this sweep is finished; go on with it, or name run folders", path=folder)
    return found


def _read(place: Place, name: str) -> Run:
    folder = place.folder
    notes: list[str] = []
    run = read_run(folder)
    status = run.get("status")
    if status != "finished":
        why = f": {run['error']}" if isinstance(run.get("error"), str) else ""
        notes.append(f"The run is not finished (status {status}{why}); what is shown is what there was of it.")
    metrics, evaluations = _metrics(folder, notes), _evaluations(folder, notes)
    return Run(folder, name, run, metrics, evaluations, notes, place.arm, place.is_baseline)


def _metrics(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    path = folder / METRICS_FILE
    if not path.is_file():
        notes.append(f"There is no {METRICS_FILE}, so nothing is shown over steps.")
        return []
    wrong: list[UserError] = []
    try:
        lines = [line for _, line in read_jsonl(path, wrong=wrong.append)]
    except UserError as error:
        notes.append(f"{METRICS_FILE} can't be read: {error}.")
        return []
    known = [line for line in lines if finite(line.get("step"))]
    if lost := len(wrong) + len(lines) - len(known):
        notes.append(f"{lost} line{'s' if lost > 1 else ''} of {METRICS_FILE} can't be read and are left out.")
    return known


def _evaluations(folder: Path, notes: list[str]) -> dict[str, Evaluation]:
    found: dict[str, Evaluation] = {}
    files = sorted(folder.glob(f"*{SUMMARY}"))
    now = model_fingerprint(folder) if files and any(any(folder.glob(each)) for each in _WEIGHTS) else None
    for file in files:
        name = file.name.removesuffix(SUMMARY)
        try:
            summary = read_json_object(file, "summary", "evaluate again")
        except UserError as error:
            notes.append(f"An evaluation is left out: {error}.")
            continue
        if fault := _fault(summary):
            notes.append(f"The evaluation {file.name} is left out: {fault}; evaluate again.")
            continue
        for score in summary["scores"].values():
            score |= {end: score.get(end) for end in ("low", "high")}
        settings = summary.get("settings")
        evaluated = settings.get("model") if isinstance(settings, dict) else None
        if None not in (now, evaluated) and evaluated != now:
            notes.append(f"The evaluation {name} is of another model than the folder holds now; evaluate again.")
        answers = file.with_name(f"{name}.jsonl")
        if not answers.is_file():
            notes.append(f"The answers of the evaluation {name} ({answers.name}) are gone; its summary is shown.")
        found[name] = Evaluation(name, summary, answers if answers.is_file() else None)
    return found


def _fault(summary: dict[str, Any]) -> str | None:
    """What is wrong with a summary; None if it can be shown."""
    scores = summary.get("scores")
    if not isinstance(scores, dict) or not all(isinstance(each, dict) for each in scores.values()):
        return "it has no scores"
    for name, score in scores.items():
        if not finite(score.get("mean")) or not all(
            score.get(end) is None or finite(score[end]) for end in ("low", "high")
        ):
            return f"its score {name} is no number"
    for key in ("headline", "lenient"):
        if summary.get(key) not in list(scores):
            return f"it does not say which score is the {key}"
    return None if isinstance(summary.get("n"), int) and summary["n"] > 0 else "it does not say of how many examples"


def finite(value: Any) -> bool:
    """Whether a value is a number that can be shown: not True, not NaN, not infinite, no integer beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
