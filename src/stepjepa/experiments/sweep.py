"""Train and evaluate the trials of a grid, on this machine or a cluster; a sweep can be stopped and started again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepjepa.errors import UserError
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.report import as_text, report
from stepjepa.experiments.sweep_folder import FAILED, FINISHED, INTERRUPTED, SweepFolder
from stepjepa.experiments.trial_run import Ending, TrialRun, end_all
from stepjepa.locks import locked
from stepjepa.signals import Interruptions


class Engine(Protocol):
    """Runs trials."""

    @property
    def busy(self) -> int:
        """How many have not ended, running or waiting."""

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """Take the unfinished trials of a folder, in the order in which to begin them."""

    def ended(self) -> list[tuple[Trial, Ending]]:
        """Those that have ended since the last call, which is not long ago."""

    def end(self, asked: Interruptions) -> None:
        """The sweep ends, because all is done or because it was asked to."""


@dataclass
class Outcome:
    """What became of the trials.

    Attributes:
        finished: those that are trained and evaluated, now or before.
        failed: those that are not, each with the reason, on one line.
        stopped: the signal that ended the sweep, 0 if none did.
    """

    finished: list[Trial] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: int = 0


def sweep(
    folder: SweepFolder, trials: Sequence[Trial], engine: Engine | None = None, *, retry_failed: bool = False
) -> Outcome:
    """Run the unfinished ones of some trials.

    Args:
        folder: of the sweep.
        trials: which.
        engine: runs them; by default this machine, one after the other.
        retry_failed: run those again that failed.

    Raises:
        UserError: another sweep is running in the folder, or see :meth:`SweepFolder.state`; nothing has been started
            then.
    """
    from tqdm import tqdm

    engine = Local() if engine is None else engine
    folder.states(trials)
    folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder.path, "stepjepa sweep"), Interruptions() as asked:
        states = folder.states(trials)
        outcome = Outcome([trial for trial in trials if states[trial.name] == FINISHED])
        if not retry_failed:
            outcome.failed = {t.name: folder.reason(t) for t in trials if states[t.name] == FAILED}
        kept = {trial.name for trial in outcome.finished} | set(outcome.failed)
        # Seed by seed, so that a sweep that is stopped early has all arms to compare.
        seeds = list(dict.fromkeys(trial.seed for trial in trials))
        left = sorted((trial for trial in trials if trial.name not in kept), key=lambda trial: seeds.index(trial.seed))
        folder.write_grid()
        quiet = not sys.stderr.isatty()
        with tqdm(total=len(trials), initial=len(kept), desc="sweep", unit="trial", disable=quiet) as bar:
            try:
                engine.begin(folder, left)
                while engine.busy and not asked.count:
                    for trial, ending in engine.ended():
                        line = _note_ending(folder, trial, ending, outcome)
                        bar.update()
                        count = len(outcome.finished) + len(outcome.failed)
                        bar.write(f"[{count}/{len(trials)}] {line}", file=sys.stdout)
                        sys.stdout.flush()
                    time.sleep(0.05)
            finally:
                engine.end(asked)
    outcome.stopped = asked.first
    order = {trial.name: number for number, trial in enumerate(trials)}
    outcome.finished.sort(key=lambda trial: order[trial.name])
    return outcome


def table(folder: SweepFolder, trials: Sequence[Trial]) -> str:
    """Finished trials as ``stepjepa report`` shows them, under their names.

    Raises:
        UserError: they were evaluated on different files.
    """
    rows = report([folder.run_folder(trial) for trial in trials])
    return as_text([{**row, "run": trial.name} for row, trial in zip(rows, trials, strict=True)])


def _note_ending(folder: SweepFolder, trial: Trial, ending: Ending, outcome: Outcome) -> str:
    """Put a trial into the outcome; returns the line about it."""
    if ending.status != FINISHED:
        outcome.failed[trial.name] = ending.reason
        return f"{trial.name}: {ending.reason} (log: {folder.log_file(trial)})"
    outcome.finished.append(trial)
    seconds = ending.seconds
    took = "" if seconds is None else f", {seconds:.0f} s" if seconds < 90 else f", {seconds / 60:.0f} min"
    return f"{trial.name}: {folder.score(trial)}{took}"


class Local:
    """Trials in processes of this machine.

    Args:
        jobs: how many run at a time.
        gpus: names of the GPUs to spread them over.
    """

    def __init__(self, jobs: int = 1, gpus: Sequence[str] = ()) -> None:
        self._jobs, self._gpus = jobs, gpus
        self._waiting: deque[Trial] = deque()
        self._running: dict[int, TrialRun] = {}

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """See :class:`Engine`."""
        self._folder = folder
        self._waiting.extend(trials)

    @property
    def busy(self) -> int:
        """See :class:`Engine`."""
        return len(self._waiting) + len(self._running)

    def ended(self) -> list[tuple[Trial, Ending]]:
        """See :class:`Engine`; also begins trials in the free slots."""
        found = []
        for slot in range(self._jobs):
            if slot not in self._running and self._waiting:
                trial, environment = self._waiting.popleft(), trial_environment(slot, self._jobs, self._gpus)
                try:
                    self._running[slot] = TrialRun(self._folder, trial, environment)
                except UserError as error:
                    found.append((trial, Ending(INTERRUPTED, str(error))))
            elif slot in self._running and (ending := self._running[slot].ended()) is not None:
                found.append((self._running.pop(slot).trial, ending))
        return found

    def end(self, asked: Interruptions) -> None:
        """See :class:`Engine`: ends what is still running, at once when asked twice."""
        end_all(list(self._running.values()), lambda: asked.count > 1)


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` would name them; found without loading CUDA."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1")]
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in done.stdout.splitlines()))]


def trial_environment(slot: int, jobs: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of the trial in a slot of ``jobs``: its share of the cores, and one GPU where there are any."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    result = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ}
    if gpus:
        result["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return result
