"""Processes that train together, started as torchrun would, of which none is ended because another has died."""

from __future__ import annotations

import os
import random
import runpy
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked


def _run(arguments: list[str], log: Path, environment: Mapping[str, str], fault: tuple[str, int] | None) -> None:
    """Run a command in this process, in which something happens when the N-th loss is computed."""
    from stepjepa.running import run
    from stepjepa.training.trainer import JepaTrainer

    before, calls = JepaTrainer.compute_loss, 0
    read = run.read_data

    def stopped(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return read(*args, **kwargs)

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault is not None and calls == fault[1]:
            if fault[0] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            import numpy
            import torch

            random.random(), numpy.random.random(), torch.rand(1)
        return before(*args, **kwargs)

    JepaTrainer.compute_loss = struck  # type: ignore[method-assign]
    if fault is not None and fault[0] == "stops":
        run.read_data = stopped
    forked.run(arguments, log, environment=environment)


def meeting(world: int) -> tuple[Any, list[dict[str, str]]]:
    """Return the store where so many processes meet while it is held, and the environment of each, as of torchrun."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"TORCHELASTIC_RUN_ID": "ranks", "TORCHELASTIC_RESTART_COUNT": "0"}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    return store, [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def _run_script(path: Path, arguments: list[str], log: Path, environment: Mapping[str, str]) -> None:
    os.environ |= environment
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(output, number)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    # As at the end of a command; threads of process groups now and then abort an interpreter that ends.
    sys.stdout.flush()
    os._exit(0)


def run_script(path: Path, arguments: Sequence[object], log: Path, world: int = 2) -> None:
    """Run a script in so many processes until all have ended, each with success, adding what they say to a log."""
    store, environments = meeting(world)
    words = [str(argument) for argument in arguments]
    processes = [forked.start(path, words, log, each, target=_run_script) for each in environments]
    ended = [forked.status(process) for process in processes]
    del store
    assert ended == [0] * world, log.read_text(encoding="utf-8")[-5000:]


def together(
    arguments: Sequence[object],
    log: Path,
    *,
    of_each: Sequence[Sequence[object]] = ((), ()),
    fault: tuple[int, str, int] | None = None,
) -> tuple[list[int], list[str]]:
    """Run a command until all processes have ended.

    Args:
        arguments: of ``stepjepa``.
        log: files of this name and the process's number take what it says.
        of_each: further arguments of each process.
        fault: the rank of a process, what comes to it, and at which of its micro-batches: it is killed (``kill``), or
            draws random numbers that the others do not draw (``draws``); or it is told to stop while it reads the data
            (``stops``, 0).

    Returns:
        How each has ended, and what it said.
    """
    store, environments = meeting(len(of_each))
    shutil.rmtree(f"{log}.errors", ignore_errors=True)
    processes, logs = [], [Path(f"{log}.{rank}") for rank in range(len(of_each))]
    for rank, own in enumerate(of_each):
        logs[rank].unlink(missing_ok=True)
        words = [str(argument) for argument in (*arguments, *own)]
        mine = fault[1:] if fault and fault[0] == rank else None
        error_file = Path(f"{log}.errors") / str(rank) / "error.json"
        error_file.parent.mkdir(parents=True)
        environments[rank]["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        processes.append(forked.start(words, logs[rank], environments[rank], mine, target=_run))
    ended = [forked.status(process) for process in processes]
    del store
    return ended, [file.read_text(encoding="utf-8") for file in logs]
