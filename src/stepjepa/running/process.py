"""The processes of a run: restore their state, compare what they were started with, print from the first one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState

from stepjepa.base.errors import UserError
from stepjepa.base.processes import is_main_process
from stepjepa.base.signals import Stopped
from stepjepa.base.terminal import spelled


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore transformers' verbosity and progress bars afterwards, and end a process group that the run began.

    ``base.signals`` restores signal handlers; Python's own logging is not changed.
    """
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    grouped = torch.distributed.is_initialized()
    try:
        yield
    except BaseException as error:
        # A barrier only where all stop: after an error or a signal to one the others may never reach it.
        if not (isinstance(error, Stopped) and error.by_all):
            _wait_for_gloo()
        elif not grouped:
            _destroy_process_group()
        raise
    else:
        if not grouped:
            _destroy_process_group()
    finally:
        transformers.logging.set_verbosity(verbosity)
        (transformers.logging.enable_progress_bar if bars else transformers.logging.disable_progress_bar)()


def _destroy_process_group() -> None:
    """End the process group; otherwise its threads sometimes abort the process at the interpreter's exit."""
    if torch.distributed.is_initialized():
        with suppress(RuntimeError):  # another process is gone
            torch.distributed.barrier()
        _wait_for_gloo()
        torch.distributed.destroy_process_group()
        # Accelerate caches the group; the next run in this process starts a new one.
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()


def _wait_for_gloo() -> None:
    """Give gloo's threads 0.4 seconds to release their tensors, for which they need the interpreter.

    Destroying the process group waits for these threads without releasing the interpreter, which is a deadlock (torch
    2.13: in 6 of 40 launches of two processes that train for three steps).
    """
    if torch.distributed.is_initialized():
        time.sleep(0.4)


def check_agreement(parts: Mapping[str, object]) -> None:
    """Raise the same UserError in every process if processes were started with different inputs.

    ``parts`` maps the name of an input to its value; the message names one that differs. Without this check the
    processes would wait for each other in vain, or average gradients of different runs.
    """
    if torch.distributed.is_initialized():
        of_all: list[dict[str, str]] = [{}] * torch.distributed.get_world_size()
        of_this_process = {name: json.dumps(value, default=str, sort_keys=True) for name, value in parts.items()}
        torch.distributed.all_gather_object(of_all, of_this_process)
        for name in parts:
            if len({values[name] for values in of_all}) > 1:
                remedy = "start all with the same command and files"
                raise UserError(f"the processes were started with different {name}; {remedy}")


def say(line: str) -> None:
    """Print a line at once, in the first process alone."""
    if is_main_process():
        print(spelled(line), flush=True)
