"""One trial at work: trained, evaluated, written down; the same on this machine and in a job of a cluster."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stepjepa.errors import UserError
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.processes import Child, hold
from stepjepa.experiments.sweep_folder import (
    EVALUATED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RESTARTED,
    RESUMED,
    RUNNING,
    SweepFolder,
)

# A trial that was ended from outside has no fault of its own, and goes on without being asked to.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Seconds that a process may take to end by itself: a training saves a checkpoint.
_GRACE = 60.0


@dataclass(frozen=True)
class Ending:
    """How a trial ended.

    Attributes:
        status: ``finished``, ``failed``, or ``interrupted`` from outside, to go on at the next start.
        reason: why it is not finished, on one line.
        seconds: that it took; None if nobody knows.
    """

    status: str
    reason: str = ""
    seconds: float | None = None


class TrialRun:
    """A trial at work, one process after the other.

    The log is locked by this process and by all it starts, so that no two are ever at work on one trial.

    Args:
        folder: of the sweep.
        trial: which.
        environment: of its processes.
        lock: a file descriptor that they hold while they live.
        token: written into the record, and looked for there before anything else is: the trial may have been given to
            somebody else in the meantime.
        job: of the cluster, written into the record.

    Raises:
        UserError: another process is at work on the trial.
    """

    def __init__(
        self,
        folder: SweepFolder,
        trial: Trial,
        environment: Mapping[str, str],
        lock: int | None = None,
        *,
        token: str | None = None,
        job: str | None = None,
    ) -> None:
        self.trial = trial
        self._folder, self._environment, self._lock, self._token = folder, environment, lock, token
        self._noted = {name: value for name, value in (("token", token), ("job", job)) if value is not None}
        self._began = time.monotonic()
        log = folder.log_file(trial)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("ab")
        if not hold(self._log):
            self._log.close()
            raise UserError("another process is at work on this trial; wait for it or stop it", path=log)
        way = folder.way_on(trial)
        # Before anything of the run is there, so that what there is can be told to be ours.
        folder.record(trial, RUNNING, **self._noted)
        if way == RESTARTED:
            folder.set_aside(trial)
        more = ("--resume_from_checkpoint", "last") if way == RESUMED else ()
        self._start("evaluate" if way == EVALUATED else "train", *more)

    def _start(self, stage: str, *more: str) -> None:
        command = self._folder.command(self.trial, stage, *more)
        self._log.write(f"$ {shlex.join(command)}\n".encode())
        self._log.flush()
        self._stage, self._child = stage, Child(command, self._log, self._environment, self._lock)

    def ended(self) -> Ending | None:
        """How it ended, once it has; None while it is at work."""
        code = self._child.ended()
        if code is None:
            return None
        if code == 0 and self._stage == "train":
            self._start("evaluate")
            return None
        self._log.close()
        ending = self._ending(code)
        more = {} if ending.status == FINISHED else {"stage": self._stage, "reason": ending.reason}
        self.write(ending.status, **more, seconds=ending.seconds)
        return ending

    def _ending(self, code: int) -> Ending:
        seconds = time.monotonic() - self._began
        if code == 0 and self._folder.is_evaluated(self.trial):
            return Ending(FINISHED, seconds=seconds)
        how = (
            f"was ended by signal {-code} ({signal.strsignal(-code)})"
            if code < 0
            else f"was stopped by signal {code - 128} ({signal.strsignal(code - 128)})"
            if code - 128 in _FROM_OUTSIDE
            else f"failed with exit code {code}"
            if code
            else "left no result"
        )
        reason = f"{self._stage} {how}: {self._folder.last_line(self.trial)}"
        # One that clears up before it ends says by its exit code, as a shell would, which signal ended it.
        number = -code if code < 0 else code - 128
        return Ending(INTERRUPTED if number in _FROM_OUTSIDE else FAILED, reason, seconds)

    def write(self, status: str, **more: object) -> None:
        """Write down what became of the trial, unless it has been given to somebody else."""
        if self._folder.read_record(self.trial).get("token") == self._token:
            self._folder.record(self.trial, status, **self._noted, **more)


def end_all(runs: Sequence[TrialRun], at_once: Callable[[], bool]) -> None:
    """End trials; their records stay as they are, since they are to go on.

    Args:
        runs: which.
        at_once: asked again and again: whether those that are still there shall be killed.
    """
    for run in runs:
        run._child.send(signal.SIGTERM)
    until = time.monotonic() + _GRACE
    killed = False
    while any(run._child.ended() is None for run in runs):
        if not killed and (at_once() or time.monotonic() > until):
            killed = True
            for run in runs:
                run._child.send(signal.SIGKILL)
        time.sleep(0.02)
    for run in runs:
        # What a process started must not outlive it.
        run._child.send(signal.SIGKILL)
        run._log.close()
