"""Checkpoints of a run: written atomically, with what training needs beside the model, and read back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import rotate_checkpoints

from stepjepa.checkpoints import move_into_place, write_checksums
from stepjepa.disk import naming_disk_errors
from stepjepa.models.heads import load_heads, save_heads, split_state, without_heads
from stepjepa.run_folder import PART
from stepjepa.training.card import CARD_FILE
from stepjepa.training.stream_counts import STREAM_FILE, StreamCounts

if TYPE_CHECKING:
    from stepjepa.training.trainer import JepaTrainer


@contextmanager
def atomic_checkpoint(trainer: JepaTrainer) -> Iterator[Path]:
    """The folder to write a checkpoint to, which takes its name when all of it is there.

    Of a checkpoint that can't be written nothing is left.
    """
    args, state, wait = trainer.args, trainer.state, trainer.accelerator.wait_for_everyone
    trainer.guard.refuse_weights(state.global_step)
    run = Path(str(args.output_dir))
    final = run / f"checkpoint-{state.global_step}"
    part = run / PART / final.name
    if args.should_save:
        shutil.rmtree(run / PART, ignore_errors=True)
    wait()
    try:
        with naming_disk_errors(final):
            yield part
            if state.best_model_checkpoint == str(part):
                state.best_model_checkpoint = str(final)
            if args.should_save:
                _save_beside(trainer, part)
    except BaseException:
        shutil.rmtree(part.parent, ignore_errors=True)
        raise
    wait()
    if args.should_save:
        with naming_disk_errors(final):
            write_checksums(part)
        move_into_place(part, final)
        rotate_checkpoints(
            output_dir=str(run),
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )
    wait()
    if args.local_process_index == 0 and part.is_dir():
        # Of a machine that shares no disk with the first: what its own processes resume from.
        move_into_place(part, final)


def _save_beside(trainer: JepaTrainer, folder: Path) -> None:
    """Save what only training needs, beside the model and the optimizer."""
    trainer.state.save_to_json(str(folder / "trainer_state.json"))
    trainer.guard.save(folder)
    if trainer.ema is not None and not trainer.args.save_only_model:
        trainer.ema.save(folder)
    if trainer.stream is not None:
        trainer.stream_counts.save(folder)


def load_beside(trainer: JepaTrainer, folder: Path) -> None:
    """Load it back.

    Raises:
        ValueError: the checkpoint of a stream is to be resumed on prepared records.
    """
    trainer.guard.load(folder)
    if trainer.ema is not None:
        trainer.ema.load(folder)
    if trainer.stream is not None:
        trainer.stream_counts = StreamCounts.load(folder, check=not trainer.args.ignore_data_skip)
    elif (folder / STREAM_FILE).is_file():
        raise ValueError(f"expected a checkpoint of prepared records, got {folder}, which was made on a stream")
    trainer.meter.num_tokens = float(trainer.state.num_input_tokens_seen)


def save_model(
    trainer: JepaTrainer, save: Callable[..., None], output_dir: str | None, state_dict: dict[str, Any] | None
) -> None:
    """Save as Trainer does, with the heads of terms in files of their own, and without a token or a draft of a card.

    Args:
        trainer: of the model.
        save: Trainer's own method.
        output_dir: by default that of the run.
        state_dict: of sharded weights, heads among them.
    """
    args = trainer.args
    rest, own = (None, {}) if state_dict is None else split_state(state_dict)
    folder = Path(output_dir or str(args.output_dir))
    had_card = (folder / CARD_FILE).is_file()
    # Trainer pickles its arguments beside the model, and a token is nothing to be kept there.
    token, args.hub_token = args.hub_token, None
    try:
        with without_heads(trainer.model) as heads:
            save(output_dir, rest)
    finally:
        args.hub_token = token
    # Trainer calls this on every process, and saves on one.
    if not args.should_save:
        return
    if heads is not None:
        save_heads(own or heads.state_dict(), folder)
    if not had_card:
        # A draft that PEFT leaves beside an adapter.
        (folder / CARD_FILE).unlink(missing_ok=True)


@contextmanager
def loading_heads(model: Any, folder: str) -> Iterator[None]:
    """Load a model without its heads inside the block, and these from their own files after it."""
    with without_heads(model) as heads:
        yield
    if heads is not None:
        load_heads(heads, folder)
