"""Train and evaluate the trials of a grid, each in processes of its own; stopped at any moment, it can go on."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from stepjepa.experiments.grid import Trial
from stepjepa.experiments.processes import Child, Interruptions, sole_use, trial_environment
from stepjepa.experiments.sweep_folder import EVALUATED, FAILED, FINISHED, RESTARTED, RESUMED, SweepFolder

# A trial that was ended from outside has no fault of its own, and goes on without being asked to.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Seconds that a process may take to end by itself.
_GRACE = 10.0


@dataclass
class _Running:
    """A trial in one of the places."""

    trial: Trial
    stage: str
    child: Child
    log: IO[bytes]
    began: float


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
    folder: SweepFolder,
    trials: Sequence[Trial],
    *,
    jobs: int = 1,
    gpus: Sequence[str] = (),
    retry_failed: bool = False,
) -> Outcome:
    """Do what is left of some trials.

    Args:
        folder: where.
        trials: which.
        jobs: how many run at a time.
        gpus: names of the GPUs to spread them over.
        retry_failed: try those again that failed.

    Raises:
        UserError: another sweep is at work in the folder, or see :meth:`SweepFolder.state`; nothing has been started
            then.
    """
    folder.states(trials)
    folder.path.mkdir(parents=True, exist_ok=True)
    with sole_use(folder.path) as lock, Interruptions() as interruptions:
        work = _Work(folder, trials, jobs=jobs, gpus=gpus, retry_failed=retry_failed, lock=lock, asked=interruptions)
        folder.write_grid()
        return work.run()


class _Work:
    """One start of a sweep, from the first trial to the last."""

    def __init__(
        self,
        folder: SweepFolder,
        trials: Sequence[Trial],
        *,
        jobs: int,
        gpus: Sequence[str],
        retry_failed: bool,
        lock: int | None,
        asked: Interruptions,
    ) -> None:
        self._folder, self._jobs, self._gpus, self._lock, self._asked = folder, jobs, gpus, lock, asked
        self._order = {trial.name: number for number, trial in enumerate(trials)}
        states = folder.states(trials)
        self._outcome = Outcome(finished=[trial for trial in trials if states[trial.name] == FINISHED])
        if not retry_failed:
            failed = [trial for trial in trials if states[trial.name] == FAILED]
            self._outcome.failed = {trial.name: folder.reason(trial) for trial in failed}
        kept = {trial.name for trial in self._outcome.finished} | set(self._outcome.failed)
        # Seed by seed, so that a sweep that is stopped early has all arms to compare.
        seeds = list(dict.fromkeys(trial.seed for trial in trials))
        left = [trial for trial in trials if trial.name not in kept]
        self._waiting = deque(sorted(left, key=lambda trial: seeds.index(trial.seed)))
        self._running: dict[int, _Running] = {}
        self._took: list[float] = []
        self._progress = _Progress(len(trials), len(kept))

    def run(self) -> Outcome:
        """Until nothing is left, or somebody wants it to stop."""
        with contextlib.closing(self._progress):
            try:
                while (self._waiting or self._running) and not self._asked.count:
                    self._fill()
                    self._collect()
                    time.sleep(0.05)
            finally:
                self._end_all()
        self._outcome.stopped = self._asked.first
        self._outcome.finished.sort(key=lambda trial: self._order[trial.name])
        return self._outcome

    def _fill(self) -> None:
        """Start trials in the free places."""
        for slot in range(self._jobs):
            if slot in self._running or not self._waiting:
                continue
            trial = self._waiting.popleft()
            way = self._folder.way_on(trial)
            self._folder.run_folder(trial).parent.mkdir(parents=True, exist_ok=True)
            # Before anything of the run is there, so that what there is can be told to be ours.
            self._folder.record(trial, "running")
            if way == RESTARTED:
                self._folder.set_aside(trial)
            more = ("--resume_from_checkpoint", "last") if way == RESUMED else ()
            self._start(slot, trial, "evaluate" if way == EVALUATED else "train", *more)

    def _start(self, slot: int, trial: Trial, stage: str, *more: str, began: float | None = None) -> None:
        command = self._folder.command(trial, stage, *more)
        log = self._folder.log_file(trial).open("ab")
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        environment = trial_environment(slot, self._jobs, self._gpus)
        child = Child(command, log, environment, self._lock)
        self._running[slot] = _Running(trial, stage, child, log, time.monotonic() if began is None else began)

    def _collect(self) -> None:
        """See which processes have ended."""
        for slot, running in list(self._running.items()):
            code = running.child.ended()
            if code is None:
                continue
            del self._running[slot]
            running.log.close()
            if code == 0 and running.stage == "train":
                self._start(slot, running.trial, "evaluate", began=running.began)
            else:
                self._close(running, code)

    def _close(self, running: _Running, code: int) -> None:
        """Write down what became of a trial, and say it."""
        folder, trial = self._folder, running.trial
        seconds = time.monotonic() - running.began
        if code == 0 and folder.state(trial) == FINISHED:
            folder.record(trial, FINISHED, seconds=seconds)
            self._took.append(seconds)
            self._outcome.finished.append(trial)
            self._progress.say(f"{trial.name}: {folder.score(trial)}, {_time(seconds)}{self._left()}")
            return
        how = (
            f"was ended by signal {-code} ({signal.strsignal(-code)})"
            if code < 0
            else f"failed with exit code {code}"
            if code
            else "left no result"
        )
        reason = f"{running.stage} {how}: {folder.last_line(trial)}"
        status = "interrupted" if -code in _FROM_OUTSIDE else FAILED
        folder.record(trial, status, stage=running.stage, reason=reason, seconds=seconds)
        self._outcome.failed[trial.name] = reason
        self._progress.say(f"{trial.name}: {reason} (log: {folder.log_file(trial)})")

    def _left(self) -> str:
        """How long it will still take, as the finished ones did."""
        count = len(self._waiting) + len(self._running)
        if not count:
            return ""
        return f", about {_time(count * sum(self._took) / len(self._took) / min(self._jobs, count))} left"

    def _end_all(self) -> None:
        """End what is still running, at once when asked twice."""
        for running in self._running.values():
            running.child.send(signal.SIGTERM)
        until = time.monotonic() + _GRACE
        killed = False
        while any(running.child.ended() is None for running in self._running.values()):
            if not killed and (self._asked.count > 1 or time.monotonic() > until):
                killed = True
                for running in self._running.values():
                    running.child.send(signal.SIGKILL)
            time.sleep(0.02)
        for running in self._running.values():
            # What a process started must not outlive it.
            running.child.send(signal.SIGKILL)
            running.log.close()


class _Progress:
    """How far all trials are: a bar on a terminal, else one line for each that ends."""

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self._total, self._done = total, done
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

    def close(self) -> None:
        """The bar stays as it is."""
        self._bar.close()


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
