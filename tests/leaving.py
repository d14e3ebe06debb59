"""Two processes that train together for a moment and leave, over and over, forked from one that has loaded torch.

    python -W ignore tests/leaving.py LAUNCHES [lost] [unsettled]

prints how many processes did not end, or not well. With ``lost`` the second process is gone before the last step of
each launch, with ``unsettled`` gloo's threads get no time to let go.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # what wrapping a model loads, once instead of in every fork

from stepjepa.errors import UserError
from stepjepa.training import group

PATIENCE = 20.0
"""Seconds after which a launch counts as hung; one takes less than one."""


def _train(rank: int, *, lost: bool) -> None:
    # The wrapped model is let go of on the way out, as the trainer is.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 5))
    for step in range(3):
        if lost and rank == 1 and step == 2:
            os._exit(0)
        model(torch.ones(3, 7)).sum().backward()
    if not lost:
        group.leave_group()


def _process(rank: int, folder: Path, *, lost: bool) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        with group.naming_lost_processes(folder):
            _train(rank, lost=lost)
    except UserError:
        if lost:
            return
        raise
    if lost:
        raise RuntimeError("did not notice that the other process is gone")


def main(launches: int, *, lost: bool) -> int:
    """Launch so many times; returns how many processes had to be killed, or ended in an error."""
    torch.set_num_threads(1)
    wrong = 0
    for _ in range(launches):
        with tempfile.TemporaryDirectory() as folder:
            left: set[int] = set()
            for rank in range(2):
                pid = os.fork()
                if pid == 0:
                    try:
                        _process(rank, Path(folder), lost=lost)
                        os._exit(0)
                    except BaseException:
                        traceback.print_exc()
                        os._exit(1)
                left.add(pid)
            end = time.monotonic() + PATIENCE
            while left and time.monotonic() < end:
                for pid in list(left):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        left.discard(pid)
                        wrong += status != 0
                time.sleep(0.005)
            wrong += len(left)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return wrong


if __name__ == "__main__":
    if "unsettled" in sys.argv:
        group.settle = lambda: None
    print(main(int(sys.argv[1]), lost="lost" in sys.argv))
