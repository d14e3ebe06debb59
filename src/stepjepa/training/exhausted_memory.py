"""The error of a training step that runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stepjepa.base.errors import UserError, is_out_of_memory
from stepjepa.batch.micro_batch import Batch
from stepjepa.training.interface import TrainerInterface
from stepjepa.training.saving import resume_hint

# Those that a resumed run may be given come first.
_REMEDIES = (
    "pass `gradient_checkpointing true` or `bf16 true`, or begin again with a smaller `batch_size` or `max_length`"
)


@contextmanager
def naming_longest_record(trainer: TrainerInterface, batches: Sequence[Batch]) -> Iterator[None]:
    """Re-raise an out-of-memory error of training as a ``UserError``, which names a record and the remedies.

    Args:
        trainer: the ``JepaTrainer`` that trains inside the block.
        batches: micro-batches of the current step so far; the longest record of the last one is named.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fault = f"out of memory in step {trainer.state.global_step + 1}"
        if batches and (records := batches[-1].records).lines:
            length, line = max(zip(records.lengths, records.lines, strict=True))
            fault += f"; the longest record of the micro-batch is {trainer.source}:{line}, with {length:,} tokens"
        raise UserError(f"{fault}; {_REMEDIES}; {resume_hint(trainer.args.output_dir)}") from None
