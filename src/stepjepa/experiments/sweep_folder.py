"""The folder of a sweep: what is there of each trial, how it goes on, what it came to.

sweep.json                     the grid, all its trials, versions
sweep.lock                     held while a sweep is at work
_slurm/                        what submitit keeps of jobs, where there are any
<label>/seed82/                run folder, with the evaluation in test.jsonl
<label>/seed82.trial.json      the flags, and what became of the trial
<label>/seed82.log             what its processes said; locked while one is at work on the trial
<label>/interrupted-1-seed82/  what a training left that was stopped before its first checkpoint
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError, visible
from stepjepa.experiments.evaluated_run import SUMMARY
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.report import as_markdown, report
from stepjepa.fields import Fields
from stepjepa.files import write_json
from stepjepa.run_folder import RUN_FILE, last_checkpoint, versions

SWEEP_FILE = "sweep.json"

# -P: as for the installed command, no file in the current folder takes the place of a module.
LAUNCHER = (sys.executable, "-P", "-m", "stepjepa")

NEW, FINISHED, FAILED, RESUMED, RESTARTED, EVALUATED = (
    "new",
    "finished",
    "failed",
    "resumed",
    "begun again",
    "evaluated",
)
"""What there is of a trial, or how it goes on: see :meth:`SweepFolder.state`."""

SUBMITTED, RUNNING, INTERRUPTED = "submitted", "running", "interrupted"
"""What the record of a trial says besides ``finished`` and ``failed``; none of them keeps it from going on."""

# Bytes at the end of a log in which its last line is looked for.
_LOOKED_AT = 65536

# What a training says of every interval begins with the step and ends with the time that is left.
_STEP = re.compile(r"step \d+/\d+\b")
_LEFT = re.compile(r", ([^,]+ left)$")


class SweepFolder:
    """The trials of a grid in one folder.

    Args:
        path: where the run folders are, or will be.
        trials: all of them.
        grid: what is written into ``sweep.json`` beside the trials.
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
        """What the processes of a trial said."""
        return self._beside(trial, ".log")

    @property
    def jobs_folder(self) -> Path:
        """What is kept of the jobs of a cluster; the name of no arm begins like that."""
        return self.path / "_slurm"

    def _beside(self, trial: Trial, ending: str) -> Path:
        run = self.run_folder(trial)
        return run.with_name(run.name + ending)

    def _output(self, trial: Trial) -> Path:
        return self.run_folder(trial) / "test.jsonl"

    def _summary(self, trial: Trial) -> dict[str, Any] | None:
        return _read(self._output(trial).with_suffix(SUMMARY))

    def command(self, trial: Trial, stage: str, *more: str) -> list[str]:
        """The command line of a stage.

        Args:
            trial: whose.
            stage: ``train`` or ``evaluate``.
            more: arguments that follow.
        """
        run = str(self.run_folder(trial))
        if stage == "train":
            own = [*trial.train, "--output_dir", run]
        else:
            own = [*trial.evaluate, "--model_path", run, "--output_file", str(self._output(trial))]
        return [*self.launcher, stage, *own, *more]

    def states(self, trials: Sequence[Trial]) -> dict[str, str]:
        """The state of each trial, by its name; see :meth:`state`."""
        return {trial.name: self.state(trial) for trial in trials}

    def state(self, trial: Trial) -> str:
        """What there is of a trial.

        Returns:
            ``finished``; ``failed``, and kept as it is; or what :meth:`way_on` returns.

        Raises:
            UserError: what is there was made with other flags, or not by a sweep.
        """
        run, record = self.run_folder(trial), self.read_record(trial)
        if not record:
            if run.exists() and (not run.is_dir() or any(run.iterdir())):
                raise UserError(
                    "is there already, and no sweep made it; move it or name another --output_dir", path=run
                )
            return NEW
        for stage in ("train", "evaluate"):
            before, now = _by_flag(record.get(stage, [])), _by_flag(getattr(trial, stage))
            if before != now:
                raise UserError(
                    f"was begun with other flags of 'stepjepa {stage}' ({_difference(before, now)}); change the grid "
                    "back, rename the arm, or name another --output_dir",
                    path=run,
                )
        if record.get("status") == FAILED:
            return FAILED
        return FINISHED if self.is_evaluated(trial) else self.way_on(trial)

    def is_evaluated(self, trial: Trial) -> bool:
        """Whether a trial is trained and evaluated."""
        return self.way_on(trial) == EVALUATED and self._summary(trial) is not None

    def way_on(self, trial: Trial) -> str:
        """What is to be done with a trial that is not finished.

        Returns:
            ``new``; ``resumed`` from a checkpoint; ``begun again`` because there is none; or only ``evaluated``.
        """
        run = self.run_folder(trial)
        if (_read(run / RUN_FILE) or {}).get("status") == FINISHED:
            return EVALUATED
        if last_checkpoint(run) is not None:
            return RESUMED
        return RESTARTED if run.is_dir() and any(run.iterdir()) else NEW

    def write_grid(self) -> None:
        """Write ``sweep.json``."""
        trials = [asdict(trial) for trial in self.trials]
        write_json(self.path / SWEEP_FILE, {"grid": self.grid, "trials": trials, "versions": versions()})

    def read_record(self, trial: Trial) -> dict[str, Any]:
        """What was written down of a trial; empty where nothing was.

        Raises:
            UserError: it is damaged.
        """
        path = self._beside(trial, ".trial.json")
        record = Fields(_read(path) or {}, path, f"restore it, or move it and {self.run_folder(trial)} elsewhere")
        for stage in ("train", "evaluate"):
            flags = record.values.get(stage, [])
            if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
                raise record.wrong(stage, "a list of texts")
        for name in ("status", "reason", "token", "job"):
            record.text_or_none(name)
        return dict(record.values)

    def record(self, trial: Trial, status: str, **more: Any) -> None:
        """Write down what became of a trial.

        Args:
            trial: which.
            status: ``submitted``, ``running``, ``interrupted``, ``failed`` or ``finished``.
            more: what else is to be known of it.
        """
        known = {"name": trial.name, "status": status, "train": trial.train, "evaluate": trial.evaluate}
        write_json(self._beside(trial, ".trial.json"), {**known, **more})

    def restore(self, trial: Trial, record: dict[str, Any]) -> None:
        """Put back what :meth:`read_record` returned, where nothing has come of what was written since."""
        path = self._beside(trial, ".trial.json")
        if record:
            write_json(path, record)
        else:
            path.unlink(missing_ok=True)

    def reason(self, trial: Trial) -> str:
        """Why a trial failed."""
        return visible(self.read_record(trial).get("reason") or "unknown")

    def score(self, trial: Trial) -> str:
        """The headline of a finished trial; what is wrong with its summary, the table of all trials will tell."""
        path = self._output(trial).with_suffix(SUMMARY)
        summary = Fields(self._summary(trial) or {}, path, "evaluate again")
        try:
            name = summary.text("headline")
            return f"{visible(name)} {summary.inner('scores').inner(name).number('mean'):.1%}"
        except UserError:
            return "no score"

    def table(self, trials: Sequence[Trial]) -> str:
        """Finished trials side by side, as ``stepjepa report`` would put them, under their names.

        Raises:
            UserError: they were evaluated on different files.
        """
        rows = report([self.run_folder(trial) for trial in trials])
        return as_markdown([{**row, "run": trial.name} for row, trial in zip(rows, trials, strict=True)])

    def set_aside(self, trial: Trial) -> None:
        """Move away what an unfinished training left; nothing is ever deleted."""
        run, number = self.run_folder(trial), 1
        # Not 'seed82...', so that 'seed*/' names the runs and nothing else.
        while (place := run.with_name(f"interrupted-{number}-{run.name}")).exists():
            number += 1
        run.rename(place)

    def last_line(self, trial: Trial) -> str:
        """What the log of a trial ends with."""
        _, said = self._last_command(trial)
        return visible(said[-1][:300]) if said else "it said nothing"

    def far(self, trial: Trial) -> str:
        """How far a trial at work is: the step its training told last, and the time left; empty before the first."""
        if not self.log_file(trial).exists():
            return ""
        command, said = self._last_command(trial)
        if command.startswith(f"$ {shlex.join([*self.launcher, 'evaluate'])} "):
            return "is evaluated"
        last = said[-1] if said else ""
        step, left = _STEP.match(last), _LEFT.search(last)
        return "" if step is None else visible(step[0] + (f", {left[1]}" if left else ""))

    def _last_command(self, trial: Trial) -> tuple[str, list[str]]:
        """The last command in the log of a trial, if it is near the end, and what it said, spaces put in order."""
        path = self.log_file(trial)
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _LOOKED_AT))
            lines = stream.read().decode(errors="replace").split("\n")
        # What was said before the last command is not about it.
        start = max((number for number, line in enumerate(lines) if line.startswith("$ ")), default=0)
        said = [" ".join(line.split()) for line in lines[start:] if line.strip() and not line.startswith("$ ")]
        return lines[start], said


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _by_flag(arguments: Sequence[str]) -> set[tuple[str, ...]]:
    """Each flag with its values; in what order they were given means nothing."""
    flags: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(argument)
    return set(map(tuple, flags))


def _difference(before: set[tuple[str, ...]], now: set[tuple[str, ...]]) -> str:
    gone, come = (" ".join(itertools.chain(*sorted(flags))) for flags in (before - now, now - before))
    return f"{gone or 'nothing'} became {come or 'nothing'}"
