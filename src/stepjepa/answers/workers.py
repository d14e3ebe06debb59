"""Run untrusted or unbounded work in processes of their own, with a limit of time and of memory for each call."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stepjepa.errors import UserError

if TYPE_CHECKING:
    from pebble import ProcessFuture, ProcessPool

MOST_WORKERS = 8

Failure = Literal["time", "memory", "crash", "error"]

# The exit code of a process that ran out of memory; any number that Python and shells don't use.
_OUT_OF_MEMORY = 113
_LONGEST_MESSAGE = 500


class Outcome(NamedTuple):
    """The result of one call.

    Attributes:
        value: what the function returned; None if it failed.
        failure: None for success; ``time`` or ``memory`` for a limit that was reached, ``crash`` for a process that
            ended by itself, ``error`` for an exception of the function.
        message: of the exception, or what happened.
    """

    value: Any
    failure: Failure | None = None
    message: str = ""


class Workers:
    """A pool of processes that run one function.

    A call that reaches a limit costs its process and no other call. The processes are new ones, not copies of this
    one, and import nothing but the function's module, so they are small even where this process holds a model.

    Args:
        function: at the top level of an importable module, which loads quickly and does nothing when loaded.
        seconds: the longest a call may take, counted from its own beginning.
        memory: MiB that a call may take beside what its process takes at the start. Not kept on systems without such
            a limit (Windows, macOS).
        processes: None for one per CPU core, :data:`MOST_WORKERS` at most.
    """

    def __init__(
        self, function: Callable[..., Any], *, seconds: float, memory: int, processes: int | None = None
    ) -> None:
        from pebble import ProcessPool

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self._function, self._seconds, self._memory = function, seconds, memory
        self._pool: ProcessPool = ProcessPool(
            processes or min(cores, MOST_WORKERS),
            initializer=_set_limits,
            initargs=(memory, os.getpid()),
            context=_Context(),
        )

    def map(self, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        """Call the function with each tuple of arguments, in parallel, and wait for all.

        Raises:
            UserError: a process can't start, most likely because it gets too little memory.
            RuntimeError: the pool is closed.
        """
        try:
            with _safe_path():
                futures = [
                    self._pool.schedule(_call, (self._function, arguments), timeout=self._seconds)
                    for arguments in calls
                ]
            return [self._outcome(future) for future in futures]
        except BaseException:
            # Ctrl-C most of all: nobody may have to wait for the processes.
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        self._pool.join()

    def _outcome(self, future: ProcessFuture[Any]) -> Outcome:
        from concurrent.futures.process import BrokenProcessPool

        from pebble import ProcessExpired

        try:
            return Outcome(future.result())
        except BrokenProcessPool:
            raise UserError(
                f"a process for {self._function.__module__}.{self._function.__name__} ended before it got work; "
                f"allow it more than {self._memory} MiB of memory"
            ) from None
        except ProcessExpired as error:
            if error.exitcode == _OUT_OF_MEMORY:
                return Outcome(None, "memory", f"took more than {self._memory} MiB")
            return Outcome(None, "crash", f"the process ended with code {error.exitcode}")
        except TimeoutError:
            return Outcome(None, "time", f"took longer than {self._seconds:g} s")
        except Exception as error:  # whatever the function raised, it is this call's alone
            return Outcome(None, "error", f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE])


@contextmanager
def _safe_path() -> Iterator[None]:
    """Python processes that start meanwhile import nothing from the current folder of their own accord."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class _Process(SpawnProcess):
    """A new process that does not run the main script again, which may import torch or lack the ``__main__`` guard."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # the name that multiprocessing calls
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            with _safe_path():
                return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


def _set_limits(memory: int, parent: int) -> None:
    """Prepare a new process: it dies with its parent, at once when told to, and gets no more memory than it may."""
    # The pool's own handler would wait for the end of a call into C.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What the function prints must not mix with the output of the program.
    os.dup2(2, 1)
    if sys.platform != "linux":
        return
    import resource

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with open("/proc/self/statm", encoding="ascii") as statistics:
        used = int(statistics.read().split()[0]) * resource.getpagesize()
    limit = used + memory * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """One call in a process, which ends where memory runs out: what it still holds nobody knows."""
    try:
        return function(*arguments)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
