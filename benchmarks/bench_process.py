"""Start the processes of the benchmark and say how far it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from stepjepa.errors import UserError
from stepjepa.files import write_json

HERE = Path(__file__).resolve().parent
CHILD = str(HERE / "bench_child.py")

OURS = ("bench_training",)
TRL = ("bench_training", "trl", "trl.trainer.sft_trainer", "datasets")
TAIL = 2000


class Children:
    """Runs tasks, each in a process of its own; a context manager.

    Args:
        threads: of each process.

    Attributes:
        folder: temporary, for what tasks share.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._servers: dict[tuple[str, ...], tuple[subprocess.Popen[str], IO[str]]] = {}
        self._temporary = tempfile.TemporaryDirectory(prefix="stepjepa-bench-")
        self.folder = Path(self._temporary.name)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *args: Any) -> None:
        for server, log in self._servers.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
            log.close()
        self._temporary.cleanup()

    def run(self, task: dict[str, Any], modules: tuple[str, ...] = OURS) -> dict[str, Any]:
        """Run one task and wait for its result.

        Args:
            task: ``run`` names its function as ``module:function``; ``threads``, ``folder`` and ``result`` are added.
            modules: imported by the server that the task's process is forked from.

        Raises:
            UserError: the process failed; its own words are in the message.
        """
        task_file, result_file = self._write(task, self._threads)
        server, log = self._server(modules)
        log.seek(0, os.SEEK_END)
        start = log.tell()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(f"{task_file}\n")
            server.stdin.flush()
            answer = server.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        log.seek(start if answer else 0)
        return _result(result_file, answer or "none: its server ended", log.read())

    def run_parallel(self, task: dict[str, Any], processes: int, threads: int) -> dict[str, Any]:
        """Run one task in several processes under torchrun; its first one writes the result.

        Args:
            task: as of :meth:`run`.
            processes: how many.
            threads: of each of them.

        Raises:
            UserError: a process failed.
        """
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return self._run_started(task, launcher, threads)

    def run_alone(self, task: dict[str, Any]) -> dict[str, Any]:
        """Run one task in a process that is started, not forked: for a GPU, whose driver does not survive a fork.

        Raises:
            UserError: the process failed.
        """
        return self._run_started(task, [], self._threads)

    def _run_started(self, task: dict[str, Any], launcher: list[str], threads: int) -> dict[str, Any]:
        task_file, result_file = self._write(task, threads)
        done = subprocess.run(
            [sys.executable, *launcher, CHILD, str(task_file)],
            env=_environment(threads),
            capture_output=True,
            text=True,
            check=False,
        )
        return _result(result_file, str(done.returncode), done.stderr)

    def _write(self, task: dict[str, Any], threads: int) -> tuple[Path, Path]:
        task_file, result_file = self.folder / "task.json", self.folder / "result.json"
        result_file.unlink(missing_ok=True)
        shared = {"threads": threads, "folder": str(self.folder), "result": str(result_file)}
        write_json(task_file, {**task, **shared})
        return task_file, result_file

    def _server(self, modules: tuple[str, ...]) -> tuple[subprocess.Popen[str], IO[str]]:
        if modules not in self._servers:
            log = (self.folder / f"server-{len(self._servers)}.log").open("w+", encoding="utf-8", errors="replace")
            server = subprocess.Popen(
                [sys.executable, CHILD, "serve", *modules],
                env=_environment(self._threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            self._servers[modules] = server, log
        return self._servers[modules]


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}


def _result(file: Path, code: str, said: str) -> dict[str, Any]:
    if code != "0" or not file.is_file():
        raise UserError(f"a run ended with code {code}:\n{said.strip()[-TAIL:]}")
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(result["error"])
    return result


class Progress:
    """One line per finished run; on a terminal also what is running now and how long the rest will take.

    Args:
        runs: how many there will be.
    """

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._done = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def begin(self, what: str) -> None:
        """Say what is running."""
        if self._terminal:
            left = "?"
            if self._done:
                left = f"{(time.monotonic() - self._start) / self._done * (self._runs - self._done) / 60:.1f} min"
            sys.stderr.write(f"\r\033[K[{self._done + 1}/{self._runs}] {what}, {left} left")
            sys.stderr.flush()

    def end(self, what: str) -> None:
        """Say what came out."""
        self._done += 1
        start = "\r\033[K" if self._terminal else ""
        sys.stderr.write(f"{start}[{self._done}/{self._runs}] {what}\n")
        sys.stderr.flush()
