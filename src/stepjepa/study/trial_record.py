"""The state of a trial of a sweep, in a file beside its run folder."""

from pathlib import Path

from stepjepa.base.files import json_or_empty
from stepjepa.base.json_object import JsonObject

NEW, BEGUN, FAILED, FINISHED = "new", "begun", "failed", "finished"
"""States of a trial; a stopped or killed one is ``begun``. The next start runs every trial that is not finished."""

RECORD = ".trial.json"
"""End of the name of the file with a trial's settings, flags and outcome."""


def record_file(sweep: Path, name: str) -> Path:
    """Return the file with settings, flags and outcome of a trial, in the folder of its sweep."""
    return sweep / f"{name}{RECORD}"


def read_trial_record(sweep: Path, name: str) -> JsonObject:
    """Return settings, flags and outcome of a trial; an empty dict if it was not begun."""
    return json_or_empty(record_file(sweep, name))
