"""The processes of trials: they end with what started them, hold locks while they live, share cores and GPUs out."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from stepjepa.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps a second sweep out
    fcntl = None  # type: ignore[assignment]  # asked for before it is used

# What a sweep that was just killed leaves behind is gone within this many seconds.
_LEFT_BEHIND = 10.0


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` would name them; found without loading CUDA."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [
            name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")
        ]
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in done.stdout.splitlines()))]


def trial_environment(slot: int, jobs: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a trial: its share of the cores, and one GPU where there are any.

    Args:
        slot: which of the ``jobs`` places it has.
        jobs: how many run at a time.
        gpus: see :func:`visible_gpus`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    result = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ}
    if gpus:
        result["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return result


@contextlib.contextmanager
def sole_use(folder: Path) -> Iterator[int | None]:
    """Keep other sweeps out of a folder; the lock goes when the last process that holds it has ended, however it did.

    Yields:
        The file descriptor that holds the lock, for children to hold it too; None where there are no locks.

    Raises:
        UserError: another sweep is at work there.
    """
    if fcntl is None:
        yield None
        return
    handle = os.open(folder / "sweep.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until = time.monotonic() + _LEFT_BEHIND
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip()
                if _alive(holder) or time.monotonic() > until:
                    raise UserError(
                        f"another sweep is at work there (process {holder or 'unknown'}, or what it started); wait for "
                        "it or stop it",
                        path=folder,
                    ) from None
                time.sleep(0.1)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield handle
    finally:
        os.close(handle)


def hold(stream: IO[bytes]) -> bool:
    """Lock an open file for this process and for all that inherit it; the lock goes when the last of them has ended.

    Args:
        stream: the file.

    Returns:
        False if another process still has it. True where the file system knows no locks, as some that clusters share.
    """
    if fcntl is None:
        return True
    until = time.monotonic() + _LEFT_BEHIND
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


def _alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# Has the kernel kill a process when the one that started it ends, be it by kill -9, and then becomes the command.
# (A preexec_fn would do the same, but not safely in a process with threads.)
_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def _ending_with_parent(command: Sequence[str]) -> list[str]:
    """A command that does not outlive this process, where the system knows how."""
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), *command]


class Child:
    """A command in a process group of its own, whose output goes into a log file.

    Args:
        command: program and arguments.
        log: appended to.
        environment: of the process.
        lock: a file descriptor that it holds while it lives.
    """

    def __init__(
        self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], lock: int | None = None
    ) -> None:
        self._process = subprocess.Popen(
            _ending_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,
        )

    def ended(self) -> int | None:
        """The exit status, a signal's number negated; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to it and to all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
