"""Run untrusted or unbounded work in separate processes, with time and memory limits per call."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pebble import ProcessExpired, ProcessPool

from stepjepa.base.errors import UserError
from stepjepa.base.processes import usable_cores

if TYPE_CHECKING:
    from multiprocessing.popen_spawn_posix import Popen
    from multiprocessing.process import BaseProcess

    from pebble import ProcessFuture

T = TypeVar("T")

# Exit code of a process that ran out of memory; a number that neither Python nor shells use.
_OUT_OF_MEMORY = 113
_LONGEST_MESSAGE = 500


class Outcome(NamedTuple):
    """The value that a call returned; or why it failed: ``time``, ``memory``, ``crash`` or ``error``, and a message."""

    value: Any  # the return value of the function; None for a failure
    failure: str | None = None
    message: str = ""


class Workers:
    """A pool of processes that run one function; if a call reaches a limit, only its own process is ended.

    The processes are spawned and import only the function's module, so they stay small even if this one holds a model.
    ``seconds`` is the time limit of each call; ``memory``, in MiB, is the limit beyond what its process uses at the
    start, enforced only on Linux. By default there is one process per CPU core, at most 8.
    """

    def __init__(self, function: Callable[..., object], *, seconds: float, memory: int, processes: int | None) -> None:
        self._function, self._seconds, self._memory = function, seconds, memory
        number, limits = processes or min(usable_cores(), 8), (memory, os.getpid())
        self._pool = ProcessPool(number, initializer=_set_limits, initargs=limits, context=_Context())

    def map(self, calls: Sequence[tuple[object, ...]]) -> list[Outcome]:
        """Call the function with each tuple of arguments, in parallel; UserError if a process can't start."""
        try:
            with _replaced(os.environ, "PYTHONSAFEPATH", "1"):
                futures = [self._pool.schedule(_call, (self._function, call), timeout=self._seconds) for call in calls]
            return [self._outcome(future) for future in futures]
        except BaseException:
            # The program must not wait for the processes, above all on Ctrl-C.
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()  # type: ignore[no-untyped-call]  # pebble does not type it
        self._pool.join()

    def _outcome(self, future: ProcessFuture[object]) -> Outcome:
        """Return the result of a call, or the reason for its failure."""
        try:
            return Outcome(future.result())
        except BrokenProcessPool:
            fault = (
                f"a process ended before it got work, out of memory; raise `memory_limit` (it is {self._memory} MiB)"
            )
            raise UserError(fault) from None
        except ProcessExpired as error:
            if error.exitcode == _OUT_OF_MEMORY:
                return Outcome(None, "memory", f"took more than {self._memory} MiB")
            return Outcome(None, "crash", f"the process ended with code {error.exitcode}")
        except TimeoutError:
            return Outcome(None, "time", f"took longer than {self._seconds:g} s")
        except Exception as error:  # an exception of the function concerns only this call
            return Outcome(None, "error", f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE])


@contextmanager
def _replaced(mapping: MutableMapping[str, T], key: str, value: T) -> Iterator[None]:
    """Replace a value of a mapping inside the block."""
    before = {key: mapping[key]} if key in mapping else {}
    mapping[key] = value
    try:
        yield
    finally:
        del mapping[key]
        mapping.update(before)


class _Process(SpawnProcess):
    """A process without modules of the working folder or the main script (it may import torch or lack a guard)."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:  # noqa: N802  # the name that multiprocessing calls
        main = ModuleType("__main__")
        with _replaced(sys.modules, "__main__", main), _replaced(os.environ, "PYTHONSAFEPATH", "1"):
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


def _set_limits(memory: int, parent: int) -> None:
    """Prepare a new process: limit its memory, and end it with its parent and on SIGTERM."""
    # The pool's own handler of SIGTERM would wait for the end of a call into C.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Output of the function goes to standard error, so that it does not mix with the output of the program.
    os.dup2(2, 1)
    if sys.platform != "linux":
        return
    import resource

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    limit = used + memory * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _call(function: Callable[..., object], arguments: tuple[object, ...]) -> object:
    """Call the function in a worker process; out of memory, end the process, since its state is unknown."""
    try:
        return function(*arguments)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
