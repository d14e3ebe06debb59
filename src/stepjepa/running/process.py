"""What a run changes in the process that it runs in, and puts back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState

from stepjepa.base.signals import Stopped


@contextmanager
def restored_process() -> Iterator[None]:
    """Put back how loud transformers is, and end the process group unless it was there before.

    Signal handlers are put back by who sets them (``base.signals``); nothing here touches Python's own logging.
    """
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    grouped = torch.distributed.is_initialized()
    try:
        yield
    except Stopped:
        # All processes stop after the same step.
        if not grouped:
            _leave_group()
        raise
    except BaseException:
        # Others may wait in vain for this process to leave.
        _settle()
        raise
    else:
        if not grouped:
            _leave_group()
    finally:
        transformers.logging.set_verbosity(verbosity)
        (transformers.logging.enable_progress_bar if bars else transformers.logging.disable_progress_bar)()


def _leave_group() -> None:
    """End the group of processes: left to the interpreter's end, its threads now and then abort the process."""
    if torch.distributed.is_initialized():
        with suppress(RuntimeError):  # another process is gone
            torch.distributed.barrier()
        _settle()
        torch.distributed.destroy_process_group()
        # Accelerate remembers the group; the next run in this process makes one anew.
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()


def _settle() -> None:
    """Give gloo's threads 0.4 seconds to release their tensors, for which they need the interpreter.

    Whoever drops the group waits for these threads without releasing the interpreter: a deadlock (torch 2.13: 6 of 40
    launches of two processes that train for three steps and leave).
    """
    if torch.distributed.is_initialized():
        time.sleep(0.4)
