"""Train and evaluate the trials of a grid, on this machine or a cluster; stopped at any moment, it can go on."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepjepa.errors import UserError
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.processes import sole_use, trial_environment
from stepjepa.experiments.slurm import refuse_jobs
from stepjepa.experiments.sweep_folder import FAILED, FINISHED, INTERRUPTED, SweepFolder
from stepjepa.experiments.trial_run import Ending, TrialRun, end_all
from stepjepa.signals import Interruptions

# Seconds between two looks at the logs of what is at work.
_SHOWN_EVERY = 1.0


class Engine(Protocol):
    """Where trials are at work."""

    @property
    def places(self) -> int | None:
        """How many are at work at a time; None if nobody knows."""

    @property
    def busy(self) -> int:
        """How many have not ended, at work or waiting."""

    def begin(self, folder: SweepFolder, trials: Sequence[Trial], lock: int | None) -> None:
        """Take what is to be done.

        Args:
            folder: of the sweep.
            trials: those that are not finished, in the order in which to begin them.
            lock: of the folder, for processes to hold.
        """

    def ended(self) -> list[tuple[Trial, Ending]]:
        """Those that have ended since the last call, which is not long ago."""

    def at_work(self) -> list[Trial]:
        """Those that are at work, not waiting."""

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
    """Do what is left of some trials.

    Args:
        folder: where.
        trials: which.
        engine: what runs them; by default this machine, one after the other.
        retry_failed: try those again that failed.

    Raises:
        UserError: another sweep is at work in the folder, or see :meth:`SweepFolder.state`; nothing has been started
            then.
    """
    engine = Local() if engine is None else engine
    folder.states(trials)
    folder.path.mkdir(parents=True, exist_ok=True)
    with sole_use(folder.path) as lock, Interruptions() as asked:
        states = folder.states(trials)
        outcome = Outcome(finished=[trial for trial in trials if states[trial.name] == FINISHED])
        if not retry_failed:
            failed = [trial for trial in trials if states[trial.name] == FAILED]
            outcome.failed = {trial.name: folder.reason(trial) for trial in failed}
        kept = {trial.name for trial in outcome.finished} | set(outcome.failed)
        # Seed by seed, so that a sweep that is stopped early has all arms to compare.
        seeds = list(dict.fromkeys(trial.seed for trial in trials))
        left = sorted((trial for trial in trials if trial.name not in kept), key=lambda trial: seeds.index(trial.seed))
        folder.write_grid()
        with contextlib.closing(_Progress(len(trials), len(kept))) as progress:
            try:
                engine.begin(folder, left, lock)
                _wait(folder, engine, asked, outcome, progress)
            finally:
                engine.end(asked)
    outcome.stopped = asked.first
    order = {trial.name: number for number, trial in enumerate(trials)}
    outcome.finished.sort(key=lambda trial: order[trial.name])
    return outcome


def _wait(folder: SweepFolder, engine: Engine, asked: Interruptions, outcome: Outcome, progress: _Progress) -> None:
    """Until nothing is left, or somebody wants it to stop."""
    took: list[float] = []
    while engine.busy and not asked.count:
        for trial, ending in engine.ended():
            if ending.status != FINISHED:
                outcome.failed[trial.name] = ending.reason
                progress.say(f"{trial.name}: {ending.reason} (log: {folder.log_file(trial)})")
                continue
            outcome.finished.append(trial)
            line = f"{trial.name}: {folder.score(trial)}"
            if ending.seconds is not None:
                took.append(ending.seconds)
                line += f", {_time(ending.seconds)}"
            if took and engine.busy and engine.places:
                # As long as the finished ones took.
                left = engine.busy * sum(took) / len(took) / min(engine.places, engine.busy)
                line += f", about {_time(left)} left"
            progress.say(line)
        progress.show(lambda: [f"{trial.name} {folder.far(trial)}".rstrip() for trial in engine.at_work()])
        time.sleep(0.05)


class Local:
    """Trials in processes of this machine.

    Args:
        jobs: how many run at a time.
        gpus: names of the GPUs to spread them over.
    """

    def __init__(self, jobs: int = 1, gpus: Sequence[str] = ()) -> None:
        self.places: int = jobs
        self._gpus = gpus
        self._waiting: deque[Trial] = deque()
        self._running: dict[int, TrialRun] = {}

    def begin(self, folder: SweepFolder, trials: Sequence[Trial], lock: int | None) -> None:
        """See :class:`Engine`.

        Raises:
            UserError: a cluster is at work on one of them.
        """
        refuse_jobs(folder, trials)
        self._folder, self._lock = folder, lock
        self._waiting.extend(trials)

    @property
    def busy(self) -> int:
        """See :class:`Engine`."""
        return len(self._waiting) + len(self._running)

    def ended(self) -> list[tuple[Trial, Ending]]:
        """See :class:`Engine`; also begins trials in the free places."""
        refused = []
        for slot in range(self.places):
            if slot not in self._running and self._waiting:
                trial, environment = self._waiting.popleft(), trial_environment(slot, self.places, self._gpus)
                try:
                    self._running[slot] = TrialRun(self._folder, trial, environment, self._lock)
                except UserError as error:
                    refused.append((trial, Ending(INTERRUPTED, str(error))))
        found = [(slot, ending) for slot, run in self._running.items() if (ending := run.ended()) is not None]
        return refused + [(self._running.pop(slot).trial, ending) for slot, ending in found]

    def at_work(self) -> list[Trial]:
        """See :class:`Engine`."""
        return [run.trial for run in self._running.values()]

    def end(self, asked: Interruptions) -> None:
        """See :class:`Engine`: ends what is still running, at once when asked twice."""
        end_all(list(self._running.values()), lambda: asked.count > 1)


class _Progress:
    """How far all trials are: on a terminal a bar with what is at work, else one line for each that ends."""

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self._total, self._done = total, done
        self._shown = 0.0
        self._bar = tqdm(
            total=total, initial=done, desc="sweep", unit="trial", file=sys.stderr, disable=not sys.stderr.isatty()
        )

    def say(self, line: str) -> None:
        """One more has ended."""
        self._done += 1
        self._bar.update()
        self._bar.clear()
        print(f"[{self._done}/{self._total}] {line}", flush=True)
        self._bar.refresh()

    def show(self, at_work: Callable[[], list[str]]) -> None:
        """Bring up to date what the bar says of those at work, once in a while."""
        if not self._bar.disable and time.monotonic() - self._shown >= _SHOWN_EVERY:
            self._shown = time.monotonic()
            self._bar.set_postfix_str("; ".join(at_work()))

    def close(self) -> None:
        """The bar stays, with nothing at work."""
        self._bar.set_postfix_str("", refresh=False)
        self._bar.close()


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
