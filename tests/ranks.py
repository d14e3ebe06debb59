"""Processes that train together and of which one comes to harm, forked from one that has loaded the libraries.

``Ranks`` starts ``stepjepa ARGUMENTS`` on several processes as torchrun does, but ends none because another has died:
what they do then is their own doing. Under torchrun itself, where a process comes to harm at the first launch alone:

    torchrun --nproc_per_node 2 --max_restarts 1 tests/ranks.py FAULT ARGUMENTS
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import forked


@dataclass(frozen=True)
class Fault:
    """What comes to one process.

    Attributes:
        kind: ``kill``, ``exit`` with status 0, ``error``, ``memory``, ``hang``, ``launcher`` (its parent is killed)
            or ``draws`` (it draws random numbers that the others do not draw).
        rank: of the process.
        where: ``loss``, ``data`` (a batch is put together), ``save``.
        at: at which call of that, from 1; a process has seen as many losses as micro-batches.
    """

    kind: str
    rank: int
    where: str
    at: int


def _strike(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        sys.exit(0)
    elif kind == "error":
        raise RuntimeError("a fault of this process alone")
    elif kind == "memory":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    elif kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    elif kind == "draws":
        import numpy
        import torch

        random.random(), numpy.random.random(), torch.rand(1)


def prepare(fault: Fault, rank: int) -> None:
    """Have a fault come to this process, if it is the one."""
    if rank != fault.rank:
        return
    from stepjepa.batch.collate import Collator
    from stepjepa.training.trainer import JepaTrainer

    owner: Any
    owner, name = {
        "loss": (JepaTrainer, "compute_loss"),
        "data": (Collator, "__call__"),
        "save": (JepaTrainer, "_save_rng_state"),
    }[fault.where]
    before, seen = getattr(owner, name), 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == fault.at:
            _strike(fault.kind)
        return before(*args, **kwargs)

    setattr(owner, name, struck)


def _launch(request: dict[str, Any]) -> int:
    """Start the processes, wait for all of them, and note how each has ended."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            number = str(rank)
            os.environ |= {"RANK": number, "LOCAL_RANK": number, "MASTER_ADDR": "127.0.0.1"}
            os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(request["ranks"]))
            os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            os.environ |= {"TORCHELASTIC_RUN_ID": "ranks", "TORCHELASTIC_RESTART_COUNT": "0"}
            code = 70
            try:
                if request["fault"]:
                    prepare(Fault(**request["fault"]), rank)
                own = request["arguments_of"][rank] if request["arguments_of"] else []
                log = f"{request['log']}.{rank}"
                code = forked.run({**request, "arguments": [*request["arguments"], *own], "log": log})
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    Path(request["log"] + ".pids").write_text(json.dumps(pids), encoding="utf-8")
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    Path(request["log"] + ".ended").write_text(json.dumps(ended), encoding="utf-8")
    return int(any(ended))


class Ranks(forked.Commands):
    """Runs commands of ``stepjepa`` on several processes."""

    def __init__(self) -> None:
        super().__init__(__file__)

    def together(
        self,
        arguments: Sequence[object],
        log: Path,
        *,
        ranks: int = 2,
        fault: Fault | None = None,
        of_each: Sequence[Sequence[object]] = (),
        seconds: float = 240,
    ) -> tuple[list[int], list[str]]:
        """Run a command until all processes have ended.

        Args:
            arguments: of ``stepjepa``.
            log: files of this name and the process's number take what it says.
            ranks: how many processes there are.
            fault: what comes to one of them.
            of_each: further arguments of each.
            seconds: within which all must have ended.

        Returns:
            How each has ended, and what it said.
        """
        each = [Path(f"{log}.{rank}") for rank in range(ranks)]
        for file in (*each, Path(f"{log}.ended")):
            file.unlink(missing_ok=True)
        self.start(
            arguments,
            log,
            folder=log / "none",
            ranks=ranks,
            fault=None if fault is None else asdict(fault),
            arguments_of=[[str(argument) for argument in own] for own in of_each],
        )
        status = self.status(seconds)
        said = [file.read_text(encoding="utf-8") for file in each]
        if status == -signal.SIGKILL:
            _wait_for(json.loads(Path(f"{log}.pids").read_text(encoding="utf-8")), seconds)
            return [], [file.read_text(encoding="utf-8") for file in each]
        ended: list[int] = json.loads(Path(f"{log}.ended").read_text(encoding="utf-8"))
        return ended, said


def _wait_for(pids: list[int], seconds: float) -> None:
    """Until processes that have lost their launcher are over."""
    until = time.monotonic() + seconds
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


def _lives(pid: int) -> bool:
    try:
        # The state comes after the name, which is in parentheses.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main(fault: str, arguments: list[str]) -> int:
    """As one of torchrun's processes."""
    from stepjepa.cli import main as command

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and fault:
        prepare(Fault(**json.loads(fault)), int(os.environ["RANK"]))
    return command(arguments)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        forked.serve(_launch)
    else:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
