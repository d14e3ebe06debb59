"""Run failure handling: one line for the user, and a run folder that says so; checkpoints that can't be loaded."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from stepjepa.batch.collate import Batch
from stepjepa.compute.flops import Shape
from stepjepa.errors import UserError, is_out_of_memory
from stepjepa.files import DISK_ERRORS
from stepjepa.models.weights import missing_of_adapter
from stepjepa.run_folder import last_checkpoint, put_back, write_run
from stepjepa.training.processes import is_lost

if TYPE_CHECKING:
    from stepjepa.training.trainer import JepaTrainer

logger = logging.getLogger(__name__)

SMALLER_STEP = (
    "pass --gradient_checkpointing true or --bf16 true, or begin again with a smaller --batch_size and a larger "
    "--grad_accum, a smaller --max_length, or --lora"
)
"""What to do where a step needs more memory than there is: first what a resumed run may be given."""


@contextmanager
def recording_failures(
    trainer: Trainer, folder: Path, record: dict[str, Any], before: str | None, checkpoint: str | None
) -> Iterator[None]:
    """Note in ``run.json`` that a run failed; put back what it held where this launch took no step.

    Args:
        trainer: trains inside.
        folder: of the run.
        record: what ``run.json`` says of the run; it may change inside.
        before: of ``run_folder.text_of_run``, from before this launch.
        checkpoint: that the run is resumed from.

    Raises:
        UserError: in the place of whatever is raised inside, but for requests to stop, errors of the system that are no
            full disk, and what says that another process is gone.
    """
    try:
        yield
    except Exception as error:  # of whatever kind: the record must not say for ever that the run goes on
        for callback in trainer.callback_handler.callbacks:
            # The thread of TensorBoard's writer would go on writing into a folder that is removed.
            if getattr(callback, "tb_writer", None) is not None:
                callback.tb_writer.close()
        first = getattr(trainer, "_initial_global_step", None)
        trained = first is not None and trainer.state.global_step > first
        environment = isinstance(error, OSError) or is_lost(error)
        with suppress(OSError):
            if trained or (environment and before is None):
                write_run(folder, {**record, "status": "failed", "error": str(error)})
            else:
                if before is None:
                    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
                put_back(folder, before)
        if isinstance(error, UserError) or is_lost(error):
            raise
        if isinstance(error, OSError):
            raise _disk_error(error, folder) from None
        if not trained:
            # An optimizer that can't be made; a checkpoint of another model.
            told = cannot_start(error)
            if checkpoint is None:
                raise UserError(f"training can't start: {told}") from None
            raise UserError(
                f"can't be resumed ({told}); if it is damaged or of another run, move it elsewhere, and resume the one "
                "before it with --resume_from_checkpoint last",
                path=checkpoint,
            ) from None
        logger.debug("training failed", exc_info=error)
        failed = f"the run failed after step {trainer.state.global_step} ({_named(error)})"
        raise UserError(f"{failed}; {way_back(folder)}; --debug 2 shows where it was") from None


def cannot_start(error: Exception) -> UserError:
    """What to tell of an error before the first step."""
    logger.debug("training can't start", exc_info=error)
    # Raised on purpose, with words for whoever started the run; of others the kind says more than the words.
    if isinstance(error, ValueError | RuntimeError | ImportError) and str(error):
        return UserError(str(error))
    return UserError(f"{_named(error)}; --debug 2 shows where it was")


def _named(error: Exception) -> str:
    # That of a KeyError is in quotes.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return f"{type(error).__name__}: {text}" if str(error) else type(error).__name__


def way_back(folder: str | Path | None, condition: str = "") -> str:
    """How a failed run can be resumed, for people."""
    last = last_checkpoint(Path(folder or "."))
    if last is None:
        return "no checkpoint was saved before; begin again in another --output_dir"
    return f"{last.name} is complete: {condition}resume with --resume_from_checkpoint last"


def _disk_error(error: OSError, folder: Path) -> OSError:
    """What to tell of a disk that can't be written to while training."""
    if error.errno not in DISK_ERRORS:
        return error
    way = way_back(folder, "once it can be written to, ")
    told: Any = UserError(f"{error.strerror}; {way}", path=error.filename or folder)
    return told


def refuse_other_weights(model: Any, load_result: Any) -> None:
    """Raise a ``ValueError`` for missing and unknown weights, of which transformers only warns."""
    tensors = model.state_dict(keep_vars=True)
    missing = set(load_result.missing_keys) - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    lost = sorted(name for name in missing if name in tensors and id(tensors[name]) not in loaded)
    if lost or load_result.unexpected_keys:
        what = f"{lost[0]} is missing" if lost else f"{sorted(load_result.unexpected_keys)[0]} is unknown"
        raise ValueError(f"its weights are those of another model: {what}")


def refuse_other_adapter(model: Any, checkpoint: Path) -> None:
    """Raise a ``ValueError`` for missing weights of an adapter, of which PEFT only warns."""
    if hasattr(model, "peft_config") and (lost := missing_of_adapter(model, checkpoint)):
        raise ValueError(f"its weights are those of another adapter: {lost[0]} is missing")


def refuse_other_optimizer(optimizer: Any) -> None:
    """Raise a ``ValueError`` for averages of other weights: a fused optimizer would write beyond their end."""
    for group in getattr(optimizer, "param_groups", ()):
        for weight in group["params"]:
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                value = optimizer.state.get(weight, {}).get(name)
                # Factored and quantized averages have other shapes; what these keep has that of the weight.
                plain = type(value) is torch.Tensor and value.dtype.is_floating_point
                if plain and value.shape != weight.shape:
                    expected, got = tuple(weight.shape), tuple(value.shape)
                    raise ValueError(f"expected '{name}' of shape {expected} in the optimizer, got {got}")


@contextmanager
def naming_the_batch(describe: Callable[[], str]) -> Iterator[None]:
    """Raise a ``UserError`` with the line that ``describe`` gives where memory runs out inside the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(describe()) from None


def describe_batch(what: str, batch: Batch | None, source: str) -> str:
    """What was being computed when memory ran out: the step or evaluation, and its micro-batch where there is one."""
    where = f"out of memory in {what}"
    if batch is None:
        return where
    members = batch["members"]
    where += f", with a batch of {len(members.lines)} records in {Shape.of(batch).tokens:,} cells"
    if members.lines:
        length, line = max(zip(members.lengths, members.lines, strict=True))
        where += f"; its longest record, {source}:{line}, has {length:,} tokens"
    return where


def describe_step(trainer: JepaTrainer) -> str:
    """The step in which memory ran out, and what helps."""
    last = trainer.guard.batches[-1] if trainer.guard.batches else None
    said = describe_batch(f"step {trainer.state.global_step + 1}", last, trainer.source)
    return f"{said}; {SMALLER_STEP}; {way_back(trainer.args.output_dir)}"
