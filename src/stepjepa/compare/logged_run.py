"""Reads run folders for the page; damaged parts are noted, and the others are shown."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepjepa.compare.evaluated_run import SUMMARY, RunFolder, find_run_folders, is_of_another_model, run_names
from stepjepa.errors import UserError
from stepjepa.fields import read_fields
from stepjepa.files import read_jsonl
from stepjepa.run_folder import METRICS_FILE, read_run


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: its name, ``NAME.summary.json``, and ``NAME.jsonl`` (None where that file is gone)."""

    name: str
    summary: dict[str, Any]
    answers: Path | None


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


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read run folders, finished or not; the folder of a sweep stands for its finished trials.

    Raises:
        UserError: a folder is no run, is named twice, or is a sweep without a finished trial.
    """
    found = find_run_folders(folders)
    names = run_names([each.folder for each in found])
    return [_read(each, name) for each, name in zip(found, names, strict=True)]


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _read(place: RunFolder, name: str) -> Run:
    folder, notes = place.folder, list[str]()
    run = read_run(folder)
    if run.get("status") != "finished":
        why = f": {run['error']}" if isinstance(run.get("error"), str) else ""
        notes.append(f"The run is not finished (status {run.get('status')}{why}); the page shows it as far as it came.")
    faults: list[UserError] = []
    lines: list[dict[str, Any]] = []
    try:
        lines = [line for _, line in read_jsonl(folder / METRICS_FILE, wrong=faults.append)]
    except UserError as error:
        notes.append(f"Nothing is shown over steps: {error}.")
    metrics = [line for line in lines if is_number(line.get("step"))]
    if lost := len(faults) + len(lines) - len(metrics):
        notes.append(f"{lost} line{'s' if lost > 1 else ''} of {METRICS_FILE} can't be read.")
    return Run(folder, place.arm, place.is_baseline, name, run, metrics, _read_evaluations(folder, notes), notes)


def _read_evaluations(folder: Path, notes: list[str]) -> dict[str, Evaluation]:
    found: dict[str, Evaluation] = {}
    for file in sorted(folder.glob(f"*{SUMMARY}")):
        name = file.name.removesuffix(SUMMARY)
        try:
            summary = read_fields(file, "summary", "evaluate again")
            summary.whole("n", 1)
            scores = summary.inner("scores")
            for score in (summary.text("headline"), summary.text("lenient"), *scores):
                scores.inner(score).number("mean")
        except UserError as error:
            notes.append(f"An evaluation is skipped: {error}.")
            continue
        if is_of_another_model(folder, summary.values):
            notes.append(f"The evaluation {name} is of another model than the folder holds now; evaluate again.")
        answers = file.with_name(f"{name}.jsonl")
        if not answers.is_file():
            notes.append(f"The answers of the evaluation {name} ({answers.name}) are gone; its summary is shown.")
        found[name] = Evaluation(name, dict(summary.values), answers if answers.is_file() else None)
    return found
