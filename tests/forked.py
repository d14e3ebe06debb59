"""Commands in processes that can be killed, ready at once: forked from one that has loaded the libraries.

The server reads requests as JSON lines (see ``Commands.start``) and runs ``stepjepa ARGUMENTS`` in a fork. It answers
with the number of the process, and with how it ended. When the process is about to change something in the folder for
the N-th time, or once a path is there, it sends itself a signal, or may from then on write no file beyond a size. A
change is a file opened for writing, a file or folder made, renamed or removed. So a test can go through all such
moments, and no clock decides which it meets.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_WRITING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
_seen = 0


def _watch_changes(request: dict[str, Any]) -> None:
    """Count the changes in a folder, and have something happen at one of them."""
    met = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal met
        global _seen  # noqa: PLW0603 - an audit hook stays for as long as the process
        if event not in _WRITING and event != "open":
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        path = arguments[0]
        if not isinstance(path, (str, bytes, os.PathLike)) or not os.fsdecode(path).startswith(request["folder"]):
            return
        _seen += 1
        if met or not (_seen == request["at"] or (request["when"] and Path(request["when"]).exists())):
            return
        met = True
        if request["largest"] is None:
            os.kill(os.getpid(), request["number"])
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest"],) * 2)

    sys.addaudithook(watch)


def run(request: dict[str, Any]) -> int:
    """Run the command of a request in this process, saying in the log how many changes there were."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate((null, log, log)):
        os.dup2(handle, number)
    _watch_changes(request)
    from stepjepa.cli import main

    try:
        return main(request["arguments"])
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        print(f"changes {_seen}", flush=True)
        sys.stderr.flush()


def serve(answer: Callable[[dict[str, Any]], int] = run) -> None:
    """Answer requests until there are no more, each by ``answer`` in a process of its own."""
    import torch

    import stepjepa.commands.evaluate
    import stepjepa.commands.export
    import stepjepa.commands.prepare
    import stepjepa.evaluation.run
    import stepjepa.training.run  # noqa: F401

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = answer(json.loads(line))
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class Commands:
    """Runs commands of ``stepjepa``, one at a time; ``server`` is the file that is run as a program and answers."""

    def __init__(self, server: str = __file__) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", server],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().decode().strip()

    def start(
        self,
        arguments: Sequence[object],
        log: Path,
        *,
        folder: Path,
        at: int = 0,
        when: Path | None = None,
        number: int = signal.SIGKILL,
        largest: int | None = None,
        **more: Any,
    ) -> int:
        """Start a command and return the number of its process.

        Args:
            arguments: of ``stepjepa``.
            log: what it says is added to this file, and how many changes there were.
            folder: in which changes are counted.
            at: the change at which something happens; none for 0.
            when: it happens once this path exists.
            number: the signal that comes then.
            largest: instead, the bytes that a file may have from then on.
            more: further parts of the request.
        """
        request = {
            "arguments": [str(argument) for argument in arguments],
            "log": str(log),
            "folder": str(folder),
            "at": at,
            "when": str(when or ""),
            "number": int(number),
            "largest": largest,
            **more,
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        return int(self._answer())

    def ended(self, seconds: float) -> bool:
        """Whether the command ends within so many seconds."""
        return bool(select.select([self._server.stdout], [], [], seconds)[0])

    def status(self, seconds: float = 240) -> int:
        """Wait for the command; returns its exit status, the number of a signal negated."""
        assert self.ended(seconds), "waited in vain"
        return int(self._answer())

    def run(self, arguments: Sequence[object], log: Path, **options: Any) -> int:
        """Start a command and wait for it."""
        self.start(arguments, log, **options)
        return self.status()

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=60)


if __name__ == "__main__":
    # Tests that load this file as a module are not slowed down by what it loads as a program.
    serve()
