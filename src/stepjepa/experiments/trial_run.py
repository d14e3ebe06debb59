"""One running trial: training, evaluation, record; the same on this machine and in a job of a cluster."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from stepjepa.errors import UserError
from stepjepa.experiments.grid import Trial
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

# A trial that one of these ended has not failed: it continues at the next start.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Seconds that a process may take to end by itself (a training saves a checkpoint), and that a lock is waited for.
_GRACE, _LOCKED_FOR = 60.0, 10.0

# Has the kernel kill a process when its parent ends, even by kill -9, and then becomes the command.
# (A preexec_fn would do the same, but is not safe in a process with threads.)
_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A command in a process group of its own, whose output goes to a log file and which ends with this process.

    Args:
        command: program and arguments.
        log: open for appending.
        environment: of the process.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> None:
        wrapper = []
        if sys.platform.startswith("linux"):
            wrapper = [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid())]
        self._process = subprocess.Popen(
            [*wrapper, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )

    def ended(self) -> int | None:
        """The exit status, a signal's number negated; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to it and to all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


@dataclass(frozen=True)
class Ending:
    """How a trial ended: ``finished``, ``failed`` or ``interrupted``, the reason on one line, and the time it took."""

    status: str
    reason: str = ""
    seconds: float | None = None


class TrialRun:
    """A running trial, one process after the other.

    The log is locked by this process and by all that it starts, so that a trial never runs twice at a time.

    Args:
        folder: of the sweep.
        trial: which.
        environment: of its processes.
        job: id in the cluster, for the record.
        patience: seconds to wait for processes of an earlier start to end.

    Raises:
        UserError: another process is running the trial.
    """

    def __init__(
        self,
        folder: SweepFolder,
        trial: Trial,
        environment: Mapping[str, str],
        *,
        job: str | None = None,
        patience: float | None = None,
    ) -> None:
        self.trial = trial
        self._folder, self._environment = folder, environment
        self._noted = {} if job is None else {"job": job}
        self._began = time.monotonic()
        log = folder.log_file(trial)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("ab")
        if not _lock(self._log, _LOCKED_FOR if patience is None else patience):
            self._log.close()
            raise UserError("another process is at work on this trial; wait for it or stop it", path=log)
        step = folder.next_step(trial)
        # Before the run folder is there, so that it can be told to be ours.
        folder.record(trial, RUNNING, **self._noted)
        if step == RESTARTED:
            folder.set_aside(trial)
        more = ("--resume_from_checkpoint", "last") if step == RESUMED else ()
        self._start("evaluate" if step == EVALUATED else "train", *more)

    def _start(self, stage: str, *more: str) -> None:
        command = self._folder.command(self.trial, stage, *more)
        self._log.write(f"$ {shlex.join(command)}\n".encode())
        self._log.flush()
        self._stage, self._child = stage, Child(command, self._log, self._environment)

    def ended(self) -> Ending | None:
        """How it ended; None while it runs."""
        code = self._child.ended()
        if code is None:
            return None
        if code == 0 and self._stage == "train":
            self._start("evaluate")
            return None
        ending = self._ending(code)
        more = {} if ending.status == FINISHED else {"stage": self._stage, "reason": ending.reason}
        self._folder.record(self.trial, ending.status, **self._noted, **more, seconds=ending.seconds)
        self._log.close()
        return ending

    def _ending(self, code: int) -> Ending:
        seconds = time.monotonic() - self._began
        if code == 0 and self._folder.is_evaluated(self.trial):
            return Ending(FINISHED, seconds=seconds)
        # One that cleans up before it ends gives the signal by its exit code, as a shell would.
        number = -code if code < 0 else code - 128
        if code < 0 or number in _FROM_OUTSIDE:
            how = f"was ended by signal {number} ({signal.strsignal(number)})"
        else:
            how = f"failed with exit code {code}" if code else "left no result"
        reason = f"{self._stage} {how}: {self._folder.last_line(self.trial)}"
        return Ending(INTERRUPTED if number in _FROM_OUTSIDE else FAILED, reason, seconds)


def _lock(stream: IO[bytes], patience: float) -> bool:
    """Lock an open file for this process and all that inherit it, until the last of them has ended.

    Returns False if another process still holds it; True where the file system has no locks, as some of clusters.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        except OSError:
            return True
        else:
            return True


def end_all(runs: Sequence[TrialRun], at_once: Callable[[], bool]) -> None:
    """End trials by SIGTERM, then SIGKILL; their records stay as they are, since they are to continue.

    Args:
        runs: which.
        at_once: asked again and again: whether those that are still running shall be killed.
    """
    for run in runs:
        run._child.send(signal.SIGTERM)
    until = time.monotonic() + _GRACE
    while any(run._child.ended() is None for run in runs):
        if at_once() or time.monotonic() > until:
            break
        time.sleep(0.02)
    for run in runs:
        # What a process started must not outlive it.
        run._child.send(signal.SIGKILL)
        while run._child.ended() is None:
            time.sleep(0.02)
        run._log.close()
