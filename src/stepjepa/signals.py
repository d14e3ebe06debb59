"""Stop requests by signal: Ctrl-C (SIGINT), a scheduler's SIGTERM, a closed terminal (SIGHUP)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# torchrun and SLURM signal every process of a job, and the parent process forwards the signal: one request arrives
# twice. Under them, signals that follow the first one within _SAME seconds count as the same request.
_PASSED_ON = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_SAME = 2.0

# Seconds between two checks that the launcher is alive, and from SIGTERM to SIGKILL once it is gone.
_LOOK, _PATIENCE = 1.0, 30.0


class Stopped(KeyboardInterrupt):
    """A stop request, raised as an exception.

    Args:
        number: the signal number.
        message: one line for the user.
    """

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.number = int(number)


class Interruptions:
    """A context manager in which stop signals are counted instead of ending the process.

    Attributes:
        count: number of stop requests so far.
        first: number of the first signal, 0 before it arrives.
    """

    def __init__(self) -> None:
        self.count, self.first = 0, 0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number

    def __enter__(self) -> Interruptions:
        # Python allows signal handlers to be set in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Keep a signal ignored that is ignored already, such as SIGHUP under nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class OneRequest(Interruptions):
    """A context manager that handles the first stop request; the second one ends the process at once.

    Args:
        act: called with the number of the first signal.
        environment: shows whether torchrun or SLURM runs this process, where one request may arrive twice.
    """

    def __init__(self, act: Callable[[int], None], environment: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        self._act = act
        self._passed_on = any(name in environment for name in _PASSED_ON)
        self._since = 0.0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.count and time.monotonic() - self._since < _SAME:
            return
        super()._note(number, frame)
        if self.count == 1:
            self._since = time.monotonic()
        if self.count > 1 or not self._passed_on:
            # Python runs its own handlers only between bytecodes, so that they wait for a long native computation.
            for other in self._before:
                signal.signal(other, signal.SIG_DFL)
        if self.count > 1:
            os.kill(os.getpid(), number)
            return
        self._act(number)


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Watch the torchrun that started this process: when it is gone, send SIGTERM, and SIGKILL 30 seconds later.

    The processes of a torchrun that was killed by ``kill -9`` survive it, and would go on writing into the folder in
    which the same command is started again. torchrun itself also waits 30 seconds between SIGTERM and SIGKILL.

    Args:
        environment: shows whether torchrun started this process; if not, nothing is done.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOK)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)

    if "TORCHELASTIC_RUN_ID" in environment:
        threading.Thread(target=watch, name="launcher", daemon=True).start()


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Raise :class:`Stopped` on the first stop request, so that unfinished work is cleaned up."""

    def stop(number: int) -> None:
        raise Stopped(number)

    with OneRequest(stop):
        yield
