"""Processes that train together, forked from one that has loaded the libraries, as torchrun would start them.

None is ended because another has died: what they do then is their own doing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked


def _strike(kind: str) -> None:
    """Kill this process, or draw random numbers that the others do not draw."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    import numpy
    import torch

    random.random(), numpy.random.random(), torch.rand(1)


def _prepare(kind: str, at: int) -> None:
    """Have this process struck when it computes a loss for the N-th time, from 1."""
    from stepjepa.training.trainer import JepaTrainer

    before, seen = JepaTrainer.compute_loss, 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == at:
            _strike(kind)
        return before(*args, **kwargs)

    JepaTrainer.compute_loss = struck  # type: ignore[method-assign]


def _launch(request: dict[str, Any]) -> int:
    """Start the processes, wait for all of them, and note how each has ended."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = []
    for rank, own in enumerate(request["of_each"]):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(request["of_each"])))
            os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            os.environ |= {"TORCHELASTIC_RUN_ID": "ranks", "TORCHELASTIC_RESTART_COUNT": "0"}
            code = 70
            try:
                if request["fault"] and request["fault"][0] == rank:
                    _prepare(*request["fault"][1:])
                arguments = [*request["arguments"], *own]
                code = forked.run({**request, "arguments": arguments, "log": f"{request['log']}.{rank}"})
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
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
        of_each: Sequence[Sequence[object]] = ((), ()),
        fault: tuple[int, str, int] | None = None,
    ) -> tuple[list[int], list[str]]:
        """Run a command until all processes have ended.

        Args:
            arguments: of ``stepjepa``.
            log: files of this name and the process's number take what it says.
            of_each: further arguments of each process.
            fault: the rank of a process, what comes to it (``kill`` or ``draws``), and at which of its micro-batches.

        Returns:
            How each has ended, and what it said.
        """
        each = [Path(f"{log}.{rank}") for rank in range(len(of_each))]
        for file in each:
            file.unlink(missing_ok=True)
        words = [[str(argument) for argument in own] for own in of_each]
        self.start(arguments, log, folder=log / "none", fault=fault, of_each=words)
        self.status()
        ended: list[int] = json.loads(Path(f"{log}.ended").read_text(encoding="utf-8"))
        return ended, [file.read_text(encoding="utf-8") for file in each]


if __name__ == "__main__":
    forked.serve(_launch)
