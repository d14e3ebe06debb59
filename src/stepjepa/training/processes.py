"""The processes that train together: how long one waits for another, what they must agree on, and when one is gone."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from stepjepa.errors import UserError
from stepjepa.run_folder import last_checkpoint

# How the errors begin that gloo has for a process that is gone or does not answer; they are plain RuntimeErrors.
_GLOO = ("gloo/transport", "[gloo]", "Gloo ")


def launched_together(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or another launcher, has started this process as one of several."""
    return int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" in environment


def refuse_separate_runs(processes: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse several processes that each would train a model of their own, and write it into the same folder.

    Args:
        processes: that train together.
        environment: says how many were started.

    Raises:
        ValueError: more were started.
    """
    if launched_together(environment) and processes != int(environment["WORLD_SIZE"]):
        raise ValueError(
            f"expected {environment['WORLD_SIZE']} processes that train one model, got {processes}; without an "
            "accelerator pass use_cpu=True to TrainingArguments"
        )


def open_group(*, cpu: bool, seconds: float, environment: Mapping[str, str] = os.environ) -> None:
    """Begin the group of processes on CPUs, where transformers' Trainer would leave ``--ddp_timeout`` out."""
    if not cpu or not launched_together(environment) or torch.distributed.is_initialized():
        return
    timeout = datetime.timedelta(seconds=seconds)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        torch.distributed.init_process_group("gloo", timeout=timeout)
        return
    # After a restart torchrun's store still holds the addresses of the processes before, which would be waited for.
    host, port, world = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), int(environment["WORLD_SIZE"])
    store = torch.distributed.TCPStore(host, port, world, is_master=False, timeout=timeout)
    own = torch.distributed.PrefixStore(f"launch_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    torch.distributed.init_process_group(
        "gloo", timeout=timeout, store=own, rank=int(environment["RANK"]), world_size=world
    )


def total(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Sums of some numbers over all processes."""
    # Sums need more than the single precision that mps has.
    device = torch.device("cpu") if accelerator.device.type == "mps" else accelerator.device
    sums: list[float] = accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=device), "sum").tolist()
    return sums


def leave_group() -> None:
    """End the group of processes: left to the interpreter's end, its threads now and then abort the process."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        settle()
        torch.distributed.destroy_process_group()


def settle() -> None:
    """Give gloo's threads 0.4 seconds to release their tensors, for which they need the interpreter.

    Whoever drops the group waits for these threads without releasing the interpreter: a deadlock (torch 2.13: 6 of 40
    launches of two processes that train for three steps and leave).
    """
    if torch.distributed.is_initialized():
        time.sleep(0.4)


def refuse_disagreement(parts: Mapping[str, Any]) -> None:
    """Have all processes end with the same error where they were not given the same.

    Without it they would wait for each other in vain, or train on gradients that do not belong together.

    Args:
        parts: what must be the same on every process, by what it is called; values that JSON can hold.

    Raises:
        UserError: a part differs.
    """
    if not torch.distributed.is_initialized():
        return
    given: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(given, json.loads(json.dumps(parts, default=str)))
    for name in parts:
        for rank, other in enumerate(given):
            if other[name] != given[0][name]:
                first, second = _difference(given[0][name], other[name])
                raise UserError(
                    f"processes 0 and {rank} were given different {name} ({first} and {second}); start all with the "
                    "same command, files and checkpoints"
                )


def _difference(one: Any, other: Any, name: str = "") -> tuple[str, str]:
    """Where two values differ, by the name of the innermost key."""
    if isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
        return _difference(one.get(key), other.get(key), f"{key} ")
    return f"{name}{str(one)[:24]}", str(other)[:24]


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process is gone or does not answer."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _GLOO)


@contextlib.contextmanager
def naming_lost_processes(folder: Path) -> Iterator[None]:
    """Raise a ``UserError`` in the place of what the library for communication says when another process is gone."""
    try:
        yield
    except BaseException as error:
        settle()
        if not is_lost(error):
            raise
        last = last_checkpoint(folder)
        way = "start the run again" if last is None else f"{last.name} is complete: start again"
        raise UserError(
            "another process of this run has ended or does not answer; what it said itself tells why, and "
            f"{way} with --resume_from_checkpoint auto"
        ) from error
