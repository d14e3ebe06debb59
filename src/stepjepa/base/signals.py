"""Stop requests by signal: Ctrl-C (SIGINT), a scheduler's SIGTERM, a closed terminal (SIGHUP)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

# torchrun and SLURM signal every process of a job, and the parent process forwards the signal, so one request arrives
# twice. Signals within this time of the first one count as the same request.
_SAME_REQUEST_SECONDS = 2.0


class Stopped(KeyboardInterrupt):
    """A stop request, raised as an exception.

    Args:
        number: of the signal.
        message: one line for the user.
        by_all: whether all processes of the run have agreed to stop at this point.
    """

    def __init__(self, number: int, message: str = "interrupted", *, by_all: bool = False) -> None:
        super().__init__(message)
        self.number, self.by_all = int(number), by_all


class Interruptions:
    """A context manager in which stop signals are counted instead of ending the process.

    Args:
        act: called with the number of the first signal; the second request then ends the process.
    """

    def __init__(self, act: Callable[[int], None] | None = None) -> None:
        self.count = 0  # stop requests so far
        self.first = 0  # number of the first signal
        self._act = act
        self._since = 0.0
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Count a stop signal; a second report of one request within a moment is ignored."""
        if self.count and time.monotonic() - self._since < _SAME_REQUEST_SECONDS:
            return
        self.count += 1
        self.first = self.first or number
        self._since = time.monotonic()
        if self._act and self.count == 1:
            self._act(number)
        elif self._act:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __enter__(self) -> Interruptions:
        # Python allows signal handlers to be set in the main thread only.
        main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Keep a signal ignored that is ignored already, such as SIGHUP under nohup. A handler that another
            # language has installed is None here: Python could replace it, but not restore it.
            if main and signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def raising() -> Interruptions:
    """Return a context manager that raises :class:`Stopped` on the first stop request.

    Unfinished files are then removed as for any other exception.
    """

    def stop(number: int) -> None:
        raise Stopped(number)

    return Interruptions(stop)
