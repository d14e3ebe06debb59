"""The folder of a sweep: what has been done of each trial, and how it continues.

sweep.json                     the grid, all its trials, versions
_slurm/                        files of submitit, where trials are jobs
<label>/seed82/                run folder, with the evaluation in test.jsonl
<label>/seed82.trial.json      the flags, and how the trial ended
<label>/seed82.log             output of its processes
<label>/interrupted-1-seed82/  a training that was stopped before its first checkpoint
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError, visible
from stepjepa.experiments.evaluated_run import SUMMARY
from stepjepa.experiments.grid import Trial
from stepjepa.files import write_json
from stepjepa.run_folder import RUN_FILE, last_checkpoint, versions

SWEEP_FILE = "sweep.json"

# -P: as for the installed command, no file in the current folder takes the place of a module.
LAUNCHER = (sys.executable, "-P", "-m", "stepjepa")

NEW, RESUMED, RESTARTED, EVALUATED = "new", "resumed", "begun again", "evaluated"
RUNNING, INTERRUPTED, FAILED, FINISHED = "running", "interrupted", "failed", "finished"


class SweepFolder:
    """The trials of a grid in one folder.

    Args:
        path: where the run folders are, or will be.
        trials: all of them.
        grid: is written into ``sweep.json`` beside the trials.
        launcher: program and first arguments that ``train ...`` and ``evaluate ...`` follow.
    """

    def __init__(
        self, path: Path, trials: Sequence[Trial], grid: dict[str, Any], launcher: Sequence[str] = LAUNCHER
    ) -> None:
        self.path, self.trials, self.grid, self.launcher = path, list(trials), grid, tuple(launcher)

    def run_folder(self, trial: Trial) -> Path:
        """Where a trial's model and answers are."""
        return self.path / trial.name

    def log_file(self, trial: Trial) -> Path:
        """Gets the output of the processes of a trial."""
        return self.path / f"{trial.name}.log"

    @property
    def jobs_folder(self) -> Path:
        """Files of submitit; no arm has a name that begins like that."""
        return self.path / "_slurm"

    def _record_file(self, trial: Trial) -> Path:
        return self.path / f"{trial.name}.trial.json"

    def command(self, trial: Trial, stage: str) -> list[str]:
        """The command line of ``train`` or ``evaluate``."""
        run = self.run_folder(trial)
        if stage == "train":
            return [*self.launcher, stage, *trial.train, "--output_dir", str(run)]
        output = ["--model_path", str(run), "--output_file", str(run / "test.jsonl")]
        return [*self.launcher, stage, *trial.evaluate, *output]

    def states(self, trials: Sequence[Trial]) -> dict[str, str]:
        """The state of each trial, by its name; see :meth:`state`."""
        return {trial.name: self.state(trial) for trial in trials}

    def state(self, trial: Trial) -> str:
        """``finished``, ``failed``, or how the trial continues: see :meth:`next_step`.

        Raises:
            UserError: the run folder was made with other flags, or not by a sweep.
        """
        run, record = self.run_folder(trial), self.read_record(trial)
        if not record:
            if run.exists() and (not run.is_dir() or any(run.iterdir())):
                raise UserError(
                    "is there already, and no sweep made it; move it or name another --output_dir", path=run
                )
            return NEW
        for stage, arguments in (("train", trial.train), ("evaluate", trial.evaluate)):
            before, now = _by_flag(record.get(stage)), _by_flag(arguments)
            if before != now:
                old, new = (" ".join(sorted(flags)).strip() or "nothing" for flags in (before - now, now - before))
                raise UserError(
                    f"was begun with other flags of 'stepjepa {stage}' ({old} became {new}); change the grid back, "
                    "rename the arm, or name another --output_dir",
                    path=run,
                )
        if record.get("status") == FAILED:
            return FAILED
        return FINISHED if self.is_evaluated(trial) else self.next_step(trial)

    def next_step(self, trial: Trial) -> str:
        """How an unfinished trial continues: ``new``, ``resumed``, ``begun again`` (no checkpoint) or ``evaluated``."""
        run = self.run_folder(trial)
        if _read(run / RUN_FILE).get("status") == FINISHED:
            return EVALUATED
        if last_checkpoint(run) is not None:
            return RESUMED
        return RESTARTED if run.is_dir() and any(run.iterdir()) else NEW

    def is_evaluated(self, trial: Trial) -> bool:
        """Whether a trial is trained and evaluated."""
        return self.next_step(trial) == EVALUATED and bool(_read(self.run_folder(trial) / f"test{SUMMARY}"))

    def write_grid(self) -> None:
        """Write ``sweep.json``."""
        trials = [asdict(trial) for trial in self.trials]
        write_json(self.path / SWEEP_FILE, {"grid": self.grid, "trials": trials, "versions": versions()})

    def read_record(self, trial: Trial) -> dict[str, Any]:
        """The record of a trial: its flags and how it ended; empty where there is none."""
        return _read(self._record_file(trial))

    def record(self, trial: Trial, status: str, reason: str = "") -> None:
        """Write the record: ``running``, ``interrupted``, ``failed`` or ``finished``, and the reason."""
        known = {"name": trial.name, "status": status, "train": trial.train, "evaluate": trial.evaluate}
        write_json(self._record_file(trial), known | ({"reason": reason} if reason else {}))

    def reason(self, trial: Trial) -> str:
        """Why a trial failed."""
        return visible(str(self.read_record(trial).get("reason", "unknown")))

    def set_aside(self, trial: Trial) -> None:
        """Rename what an unfinished training left; nothing is ever deleted."""
        run = self.run_folder(trial)
        # Not 'seed82...', so that 'seed*/' names the runs and nothing else.
        places = (run.with_name(f"interrupted-{number}-{run.name}") for number in itertools.count(1))
        run.rename(next(place for place in places if not place.exists()))

    def last_line(self, trial: Trial) -> str:
        """The last line that a trial has written."""
        log = self.log_file(trial)
        text = log.read_bytes()[-65536:].decode(errors="replace") if log.exists() else ""
        lines = [" ".join(line.split()) for line in text.split("\n") if line.strip()]
        return visible(lines[-1][:300]) if lines and not lines[-1].startswith("$ ") else "no output"


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _by_flag(arguments: Any) -> set[str]:
    """Each flag with its values; the order of the flags has no meaning."""
    words = map(str, arguments) if isinstance(arguments, list | tuple) else ()
    return {f"--{flag}" for flag in f" {' '.join(words)}".split(" --")[1:]}
