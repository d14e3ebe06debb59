"""Requests to stop that come as signals: Ctrl-C, a scheduler's SIGTERM, a terminal that is closed."""

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

# torchrun and SLURM send a signal to all processes of a job, and what started them passes it on: one request comes
# twice. Whatever comes within so many seconds is the same request then.
_PASSED_ON = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_SAME = 2.0

# Seconds between two looks at whether the launcher lives, and from a request to stop to the end.
_LOOK, _PATIENCE = 1.0, 30.0


class Stopped(KeyboardInterrupt):
    """The program was asked to end.

    Args:
        number: of the signal.
        message: what to tell, on one line.
    """

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.number = int(number)


class Interruptions:
    """Counts the requests to stop, instead of dying of them, while it is entered.

    Attributes:
        count: how many came.
        first: the number of the first signal, 0 while there was none.
    """

    def __init__(self) -> None:
        self.count, self.first = 0, 0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number

    def __enter__(self) -> Interruptions:
        # Elsewhere Python lets nobody handle signals.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Under nohup a closed terminal is to be ignored, and stays so.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class OneRequest(Interruptions):
    """Notes the first request to stop while it is entered; the second ends the process at once, by the system's hand.

    Args:
        act: called with the number of the first signal.
        environment: tells whether signals are passed on, so that one request may come twice.
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
            # Not by a handler of Python's, which waits for the end of a long computation.
            for other in self._before:
                signal.signal(other, signal.SIG_DFL)
        if self.count > 1:
            os.kill(os.getpid(), number)
            return
        self._act(number)


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Have this process asked to stop when torchrun is gone that started it, and ended soon after.

    What torchrun starts outlives it where it was killed by ``kill -9``: it would go on writing into the folder in which
    the same command is started again. In time of need torchrun gives as long between SIGTERM and SIGKILL.

    Args:
        environment: says whether torchrun started this process.
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
    """Have the first request to stop raise :class:`Stopped`, so that what is half done is cleared away."""

    def stop(number: int) -> None:
        raise Stopped(number)

    with OneRequest(stop):
        yield
