"""Run untrusted or boundless work in processes that are ended when they take too long or too much memory."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any, Literal, NamedTuple

from stepjepa.errors import UserError

MOST_WORKERS = 8

Failure = Literal["time", "memory", "crash", "error"]


class Outcome(NamedTuple):
    """What became of one call.

    Attributes:
        value: what the function returned; None if it failed.
        failure: None if all went well; ``time`` or ``memory`` for a limit that was reached, ``crash`` for a process
            that ended by itself, ``error`` for an exception of the function.
        message: of the exception, or what happened.
    """

    value: Any
    failure: Failure | None = None
    message: str = ""


class Workers:
    """A pool of processes that run one function.

    A call that reaches a limit costs its process, not the pool, and no other call. The processes are started when
    they are needed. They are new ones, no copies of this one, and import nothing but the function's module, so they
    are small also where this process holds a model.

    Args:
        function: at the top level of a module that loads quickly and does nothing when loaded.
        seconds: the longest a call may take, counted from its own beginning.
        memory: MiB of address space that a process may take, about 50 for Python included. Not kept on systems
            without such a limit (Windows, macOS).
        processes: None for one per CPU core, :data:`MOST_WORKERS` at most.

    Raises:
        ValueError: the function can't be imported by other processes, or a number is not above 0.
    """

    def __init__(
        self, function: Callable[..., Any], *, seconds: float, memory: int, processes: int | None = None
    ) -> None:
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or "." in name or "<" in name:
            raise ValueError(f"function: expected one at the top level of an importable module, got {module}.{name}")
        for setting, value in {"seconds": seconds, "memory": memory, "processes": processes}.items():
            if value is not None and value <= 0:
                raise ValueError(f"{setting}: expected more than 0, got {value}")
        self._job = _Job(module, name, seconds, memory)
        count = processes or min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, MOST_WORKERS)
        # A thread waits for each process; those that wait for a call lie in the queue.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="workers")
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._processes: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False

    def map(self, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        """Call the function with each tuple of arguments, side by side, and wait for all.

        Raises:
            UserError: a process can't start, most likely because it gets too little memory.
        """
        try:
            futures = [self._threads.submit(self._call, arguments) for arguments in calls]
            return [future.result() for future in futures]
        except BaseException:
            # Ctrl-C most of all: nobody may be left waiting for the processes.
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        while self._processes:
            self._processes.pop().end()

    def _call(self, arguments: tuple[Any, ...]) -> Outcome:
        process = self._take()
        outcome = process.call(arguments)
        if process.usable:
            self._idle.put(process)
        else:
            self._drop(process)
        return outcome

    def _take(self) -> _Process:
        """A process that waits for a call."""
        with suppress(Empty):
            while True:
                process = self._idle.get_nowait()
                if process.alive():
                    return process
                self._drop(process)
        return self._start()

    def _drop(self, process: _Process) -> None:
        with self._lock:
            self._processes.discard(process)
        process.end()

    def _start(self) -> _Process:
        with self._lock:
            # Nothing may start behind the back of close().
            if self._closed:
                raise RuntimeError("the workers are closed")
            process = _Process(self._job)
            self._processes.add(process)
        process.wait_until_ready()
        return process


class _Job(NamedTuple):
    """What a process is started for, see :class:`Workers`."""

    module: str
    name: str
    seconds: float
    memory: int


# How a process ends that ran out of memory; any number that Python and shells don't use.
_OUT_OF_MEMORY = 113
_LONGEST_MESSAGE = 500
_BOOTSTRAP = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from stepjepa.answers.workers import serve
serve()
"""


class _Process:
    """One process, seen from outside.

    Attributes:
        usable: whether it can take another call.
    """

    def __init__(self, job: _Job) -> None:
        self.usable = True
        self._job = job
        self._popen = subprocess.Popen(
            # -P: nothing is imported from the current folder before the search path of this process is taken over.
            [sys.executable, "-P", "-c", _BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # In a group of its own: Ctrl-C is for this process, which ends the others.
            process_group=0 if os.name == "posix" else None,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._to, self._from = self._popen.stdin, self._popen.stdout

    def wait_until_ready(self) -> None:
        with suppress(OSError):  # it has ended already, as the answer will tell
            self._to.write(pickle.dumps(sys.path))
            _send(self._to, pickle.dumps(self._job))
        if _receive(self._from) is None:
            raise UserError(
                f"a process for {self._job.module}.{self._job.name} ended while it started, with code "
                f"{self._popen.wait()}; allow it more than {self._job.memory} MiB of memory"
            )

    def alive(self) -> bool:
        return self._popen.poll() is None

    def call(self, arguments: tuple[Any, ...]) -> Outcome:
        seconds = self._job.seconds
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            with suppress(OSError):
                _send(self._to, pickle.dumps(arguments))
            answer = _receive(self._from)
        finally:
            timer.cancel()
        # A call that ended at the very last moment counts, but its process may have been killed since.
        self.usable = answer is not None and not late.is_set()
        if answer is not None:
            return answer
        if late.is_set():
            return Outcome(None, "time", f"took longer than {seconds:g} s")
        code = self._popen.wait()
        if code == _OUT_OF_MEMORY:
            return Outcome(None, "memory", f"took more than {self._job.memory} MiB")
        return Outcome(None, "crash", f"the process ended with code {code}")

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> None:
        """Kill the process and let go of its pipes."""
        self.kill()
        self._popen.wait()
        with suppress(OSError):  # what was not sent before it ended
            self._to.close()
        self._from.close()


def serve() -> None:
    """What a process does: read calls from standard input, write outcomes to what was standard output."""
    calls = sys.stdin.buffer
    # What the function prints goes to the terminal, not between the outcomes.
    outcomes = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    job: _Job = _receive(calls)
    _limit_memory(job.memory * 2**20)
    try:
        function = getattr(importlib.import_module(job.module), job.name)
        _send(outcomes, pickle.dumps(Outcome(None)))
        while (arguments := _receive(calls)) is not None:
            _set_alarm(job.seconds)
            outcome = _run(function, arguments)
            _set_alarm(0)
            _send(outcomes, outcome)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """The outcome of a call, ready to be sent."""
    try:
        return pickle.dumps(Outcome(function(*arguments)))
    except MemoryError:
        raise
    except Exception as error:  # whatever the function raised, it is this call's alone
        return pickle.dumps(Outcome(None, "error", f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]))


def _set_alarm(seconds: float) -> None:
    """Have this process end by itself if nobody outside has ended it a while after its time; 0 for no longer."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds and 2 * seconds + 1)


def _limit_memory(limit: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (ImportError, ValueError, OSError):
        # No such limit on Windows, and none that could be set on macOS.
        return


_LENGTH = struct.Struct("<Q")


def _send(stream: IO[bytes], content: bytes) -> None:
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """The next value that was sent; None if the stream ends before it does."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    content = stream.read(length)
    return pickle.loads(content) if len(content) == length else None
