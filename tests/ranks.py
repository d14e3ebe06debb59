"""Processes that train together, started as torchrun would, of which none is ended because another has died."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked


def _run(arguments: list[str], log: Path, environment: Mapping[str, str], fault: tuple[str, int] | None) -> None:
    """Run a command in this process, in which something happens when the N-th loss is computed."""
    from stepjepa.training.trainer import JepaTrainer

    before, calls = JepaTrainer.compute_loss, 0

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
    forked.run(arguments, log, environment=environment)


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
            draws random numbers that the others do not draw (``draws``).

    Returns:
        How each has ended, and what it said.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"TORCHELASTIC_RUN_ID": "ranks", "TORCHELASTIC_RESTART_COUNT": "0"}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(of_each)))
    processes, logs = [], [Path(f"{log}.{rank}") for rank in range(len(of_each))]
    for rank, own in enumerate(of_each):
        logs[rank].unlink(missing_ok=True)
        words = [str(argument) for argument in (*arguments, *own)]
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        mine = fault[1:] if fault and fault[0] == rank else None
        processes.append(forked.start(words, logs[rank], environment, mine, target=_run))
    return [forked.status(process) for process in processes], [file.read_text(encoding="utf-8") for file in logs]
