"""``stepjepa train --dry_run``: print what a run would cost, and stop.

No weights are read, drawn or kept, and nothing is written. The data is prepared for real, so all its errors come to
light here, too.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.run_folder import is_main_process
from stepjepa.training.estimate import Estimate, estimate
from stepjepa.training.estimate_table import as_dict, describe

# What torchrun tells a process of the others; a dry run needs their number alone.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def dry_run(
    args: argparse.Namespace,
    config: JepaConfig,
    records: Sequence[Record],
    eval_records: Sequence[Record],
    make_arguments: Callable[[argparse.Namespace], TrainingArguments],
) -> dict[str, Any] | None:
    """Print the estimate of a run, from the first of its processes.

    The number of processes is that of torchrun; ``WORLD_SIZE=8 stepjepa train ... --dry_run`` stands in for it where
    there are no eight devices.

    Args:
        args: of ``commands.train``.
        config: made of them.
        records: to be trained on.
        eval_records: held out; prepared for their errors' sake.
        make_arguments: makes the TrainingArguments of ``args``.

    Returns:
        The same for programs, see ``estimate_table.as_dict``; None from the other processes.

    Raises:
        UserError: what the run itself would raise before its first step.
    """
    if not is_main_process():
        return None
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    found = foretell(args, config, records, eval_records, make_arguments, processes=processes)
    lines = ["dry run: no weights are read or made, and nothing is written", *describe(found)]
    lines.append("time       not estimated: it takes a measured speed of your device; see 'stepjepa estimate'")
    print("\n".join(lines))
    return as_dict(found)


def foretell(
    args: argparse.Namespace,
    config: JepaConfig,
    records: Sequence[Record],
    eval_records: Sequence[Record],
    make_arguments: Callable[[argparse.Namespace], TrainingArguments],
    *,
    processes: int,
    elsewhere: bool = False,
    samples: int = 0,
    whole: int | None = None,
) -> Estimate:
    """The estimate of a run.

    Args:
        args: see :func:`dry_run`.
        config: see there.
        records: see there.
        eval_records: see there.
        make_arguments: see there.
        processes: number of them.
        elsewhere: the run is to be on other devices than are here.
        samples: see ``estimate``.
        whole: see there.

    Raises:
        UserError: what the run itself would raise before its first step.
    """
    with _alone():
        given = dict(args.training)
        # Its package need not be there to read its configuration.
        deepspeed = _read_deepspeed(given.pop("deepspeed", None))
        # Without this, 16 bits would be refused on a machine that is only asked.
        given.setdefault("use_cpu", not torch.accelerator.is_available())
        training = make_arguments(argparse.Namespace(**{**vars(args), "training": given}))
        asked = "use_cpu" not in args.training and (training.bf16 or training.fp16 or processes > 1)
        return estimate(
            args,
            config,
            records,
            eval_records,
            training,
            deepspeed=deepspeed,
            processes=processes,
            on_cpu=training.device.type == "cpu" and not asked and not elsewhere,
            samples=samples,
            whole=whole,
        )


@contextmanager
def _alone() -> Iterator[None]:
    """Hide from libraries that there are other processes, so that they do not wait for them."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _read_deepspeed(value: Any) -> dict[str, Any] | None:
    """DeepSpeed's configuration: a file, or JSON itself."""
    if value is None or isinstance(value, dict):
        return value
    text = str(value)
    try:
        found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--deepspeed: can't be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"--deepspeed: expected a JSON object, got {type(found).__name__}")
    return found
