"""The folder of a sweep: the file that marks it, and the evaluation that it makes of each of its trials."""

from pathlib import Path

from stepjepa.store.folder import RUN_FILE, SUMMARY

SWEEP_FILE = "sweep.json"

EVALUATION = "test"
"""Name of the evaluation of a trial by its sweep."""


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (folder / SWEEP_FILE).is_file() and not (folder / RUN_FILE).is_file()


def sweep_evaluation(folder: Path) -> str | None:
    """Return the name of the evaluation that a sweep made of its trial; None for any other folder."""
    path = folder.resolve()
    of_sweep = len(path.parents) > 1 and is_sweep(path.parents[1])
    return EVALUATION if of_sweep and (path / f"{EVALUATION}{SUMMARY}").is_file() else None
