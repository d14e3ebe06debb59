"""Out of memory while training: which batch it was, and what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepjepa.errors import UserError
from stepjepa.memory import is_out_of_memory
from stepjepa.training.nonfinite import MicroBatch, name_records

if TYPE_CHECKING:
    from transformers import TrainingArguments


@contextmanager
def naming_the_batch(describe: Callable[[], str]) -> Iterator[None]:
    """Say in one line what was computed when memory ran out inside the block.

    Args:
        describe: gives that line.

    Raises:
        UserError: memory has run out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(describe()) from None


def describe(what: str, micro: MicroBatch | None, source: str) -> str:
    """What was being computed, for people.

    Args:
        what: the step, or the evaluation.
        micro: the micro-batch; None where memory ran out before the first or after the last.
        source: what the records' file is called.
    """
    where = f"out of memory in {what}"
    if micro is None:
        return where
    members = micro.members
    where += f", with a batch of {len(members.lines)} records in {micro.cells:,} cells"
    if members.lines:
        longest = max(range(len(members.lines)), key=members.lengths.__getitem__)
        record = name_records(source, [members.lines[longest]])
        where += f"; its longest record, {record}, has {members.lengths[longest]:,} tokens"
    return where


def remedies(args: TrainingArguments, *, selective: bool = False) -> str:
    """At least three flags that make a step smaller, for people: first those that a resumed run may be given.

    Args:
        args: of the run.
        selective: activations are checkpointed selectively already.
    """
    resumed, anew = [], []
    if not args.gradient_checkpointing:
        resumed.append("--gradient_checkpointing true" + ("" if selective else " (or --selective_checkpointing)"))
    if not (args.bf16 or args.fp16):
        resumed.append("--bf16 true")
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if batch > 1:
        half = next(size for size in range(batch // 2, 0, -1) if batch % size == 0)
        anew.append(f"--batch_size {half} --grad_accum {accumulation * (batch // half)} (the same steps)")
    anew += ["a smaller --max_length (with --over_length truncate or skip)", "--lora"]
    said = [f"pass {' or '.join(resumed)}"] if resumed else []
    return ", or ".join([*said, f"begin again with {' or '.join(anew)}"])
