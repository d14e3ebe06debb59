"""Commands in processes that can be killed, ready at once: forked from a server that has loaded the libraries.

When such a process is about to change something in a folder for the N-th time, or once a path is there, it sends itself
a signal, or may from then on write no file beyond a size. A change is a file opened for writing, a file or folder made,
renamed or removed. So a test can go through all such moments, and no clock decides which it meets.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
# With what commands load when they need it, in every process anew.
_SERVER.set_forkserver_preload(
    [
        *("stepjepa.running.run", "stepjepa.running.estimate", "stepjepa.running.export", "stepjepa.evaluation.run"),
        *("stepjepa.cli.train", "stepjepa.cli.evaluate", "stepjepa.cli.export", "stepjepa.cli.prepare"),
        *("transformers.models.llama.modeling_llama", "torch.utils.tensorboard", "torch.profiler"),
        *("matplotlib.figure", "matplotlib.backends.backend_agg", "scipy.stats"),
    ]
)
_WRITING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
_seen = 0


@dataclass(frozen=True)
class Moment:
    """What happens at the change number ``at`` in a folder, or at the first one when the path ``when`` is there.

    It is the signal ``number``, or that no file may be larger than ``largest`` bytes from then on. The command runs in
    the working directory ``directory``.
    """

    folder: Path
    at: int = 0
    when: Path | None = None
    number: int = signal.SIGKILL
    largest: int | None = None
    directory: Path | None = None

    def await_it(self) -> None:
        """Count the changes in the folder, and have it happen."""
        met = False

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal met
            global _seen  # noqa: PLW0603 - an audit hook stays for as long as the process
            if event not in _WRITING and event != "open":
                return
            if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            path = arguments[0]
            if not isinstance(path, (str, bytes, os.PathLike)) or not os.fsdecode(path).startswith(str(self.folder)):
                return
            _seen += 1
            if met or not (_seen == self.at or (self.when and self.when.exists())):
                return
            met = True
            if self.largest is None:
                os.kill(os.getpid(), self.number)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.largest,) * 2)

        sys.addaudithook(watch)


def run(arguments: list[str], log: Path, moment: Moment | None = None, environment: Mapping[str, str] = {}) -> None:
    """Run a command in this process, adding what it says to a log, and at last its changes, its memory and seconds."""
    import torch

    torch.set_num_threads(1)
    os.environ |= environment
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(output, number)
    if moment is not None:
        if moment.directory is not None:
            os.chdir(moment.directory)
        moment.await_it()
    from stepjepa.cli.main import main

    code = 1
    try:
        code = main(arguments)
    except Exception:
        traceback.print_exc()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"changes {_seen}, peak {peak} KiB, seconds {time.process_time()}", flush=True)
    sys.stderr.flush()
    os._exit(code)


def start(*arguments: Any, target: Any = run) -> Any:
    """A process that runs a function on these arguments."""
    process = _SERVER.Process(target=target, args=arguments)
    process.start()
    return process


def status(process: Any, seconds: float = 240) -> int:
    """Wait for a process; returns its exit status, the number of a signal negated."""
    process.join(seconds)
    assert process.exitcode is not None, "waited in vain"
    return int(process.exitcode)


class Commands:
    """Runs commands of ``stepjepa``, one at a time; see :func:`run` and :class:`Moment`."""

    def start(self, arguments: Sequence[object], log: Path, **moment: Any) -> int:
        """Start a command and return the number of its process."""
        self._process = start([str(argument) for argument in arguments], log, Moment(**moment))
        return int(self._process.pid)

    def ended(self, seconds: float) -> bool:
        """Whether the command ends within so many seconds."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def status(self) -> int:
        """Wait for the command."""
        return status(self._process)

    def run(self, arguments: Sequence[object], log: Path, **moment: Any) -> int:
        """Start a command and wait for it."""
        self.start(arguments, log, **moment)
        return self.status()
