"""Read run folders for the page; damaged parts become notes, the rest is shown."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stepjepa.base.errors import UserError
from stepjepa.base.files import read_json_object, read_jsonl
from stepjepa.base.json_object import JsonObject
from stepjepa.store.folder import METRICS_FILE, SUMMARY
from stepjepa.store.record import read_run
from stepjepa.study.evaluated_run import is_of_another_model
from stepjepa.study.run_folders import RunFolder, find_run_folders, run_names


@dataclass(frozen=True)
class LoggedRun(RunFolder):
    """A run folder as the page shows it; damaged parts are missing, and named in ``notes``."""

    name: str = ""  # unique among the runs; it comes from the user, so it must be escaped
    run: JsonObject = field(default_factory=dict)  # content of the run record; any part may be missing
    metrics: list[JsonObject] = field(default_factory=list)  # lines of metrics.jsonl that have a step
    evaluations: dict[str, JsonObject] = field(default_factory=dict)  # name -> content of NAME.summary.json
    notes: list[str] = field(default_factory=list)  # parts that could not be read, one sentence each

    def get(self, *path: str) -> Any:
        """Return the value at a path in the run record, or None."""
        value: object = self.run
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def is_number(value: object) -> bool:
    """Return whether a value is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[LoggedRun]:
    """Read run folders, finished or not, by :func:`find_run_folders`; raise ``UserError`` if one is no run."""
    places = find_run_folders(folders)
    names = run_names([place.folder for place in places])
    runs = [
        LoggedRun(place.folder, place.arm, place.is_baseline, name, read_run(place.folder))
        for place, name in zip(places, names, strict=True)
    ]
    for run in runs:
        status, error = run.get("status"), run.get("error")
        if status != "finished":
            why = f"status {status}: {error}" if isinstance(error, str) else f"status {status}"
            run.notes.append(f"The run is not finished ({why}); the page shows it as far as it came.")
        _read_metrics(run)
        _read_evaluations(run)
    return runs


def _read_metrics(run: LoggedRun) -> None:
    """Read the lines of ``metrics.jsonl`` that have a step; note those that can't be read."""
    faults: list[UserError] = []
    try:
        lines = [line for _, line in read_jsonl(run.folder / METRICS_FILE, on_error=faults.append)]
        run.metrics.extend(line for line in lines if is_number(line.get("step")))
    except UserError as missing:
        run.notes.append(f"Nothing is shown over steps: {missing}.")
    if faults:
        run.notes.append(f"Lines of {METRICS_FILE} can't be read ({len(faults)}; the first is {faults[0]}).")


def _read_evaluations(run: LoggedRun) -> None:
    """Read the summaries of evaluations; note those that are damaged or of another model."""
    for file in sorted(run.folder.glob(f"*{SUMMARY}")):
        name = file.name.removesuffix(SUMMARY)
        try:
            run.evaluations[name] = read_json_object(file, "summary", "evaluate again")
        except UserError as fault:
            run.notes.append(f"An evaluation is skipped: {fault}.")
            continue
        if is_of_another_model(run.folder, run.evaluations[name]):
            run.notes.append(f"The evaluation {name} is of another model than the one in the folder; evaluate again.")


def by_evaluation(runs: Sequence[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Return the runs that have each evaluation, by its name."""
    names = dict.fromkeys(name for run in runs for name in run.evaluations)
    return {name: [run for run in runs if name in run.evaluations] for name in names}
