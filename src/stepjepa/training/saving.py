"""Write checkpoints atomically, with the state of training beside the model, and load them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepjepa.base.files import naming_disk_errors
from stepjepa.models.architecture import load_heads, save_heads, split_state, without_heads
from stepjepa.models.generation_settings import save_generation_config
from stepjepa.models.weights import missing_of_adapter
from stepjepa.store.folder import (
    CARD_FILE,
    PART,
    WITHOUT_OPTIMIZER,
    checkpoint_fault,
    checkpoints,
    last_checkpoint,
    move_into_place,
    remove_old_checkpoints,
    write_checksums,
)
from stepjepa.training.interface import SavingTrainer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def resume_hint(folder: str | Path | None, condition: str = "", *, again: str = "in another `output_dir`") -> str:
    """Return a hint for error messages: how a failed run is resumed.

    Args:
        folder: the run folder.
        condition: put in front of what to do, such as ``once it can be written to,`` and a blank.
        again: how a run without a checkpoint is begun again.
    """
    run = Path(folder or ".")
    last = last_checkpoint(run)
    if last is None:
        models = [path.name for path in checkpoints(run) if checkpoint_fault(path) == WITHOUT_OPTIMIZER]
        before = f"{models[0]} holds the model alone" if models else "no checkpoint was saved before"
        return f"{before}; {condition}begin again {again}"
    return f"{last.name} is complete: {condition}resume with `resume_from_checkpoint last`"


@contextmanager
def atomic_checkpoint(trainer: SavingTrainer) -> Iterator[Path]:
    """Yield a temporary folder to write a checkpoint into; the checkpoint gets its final name when it is complete.

    A checkpoint that can't be written is removed.
    """
    args, state, wait = trainer.args, trainer.state, trainer.accelerator.wait_for_everyone
    run = Path(str(args.output_dir))
    final = run / f"checkpoint-{state.global_step}"
    part = run / PART / final.name
    if args.should_save:
        shutil.rmtree(run / PART, ignore_errors=True)
    wait()
    try:
        with naming_disk_errors(final):
            yield part.parent
            if not args.save_only_model:
                trainer.resume.save(part)
            if state.best_model_checkpoint == str(part):
                state.best_model_checkpoint = str(final)
            if args.should_save:
                state.save_to_json(str(part / "trainer_state.json"))
                # With the weights of the best checkpoint its averages are loaded, too.
                if trainer.ema is not None and (not args.save_only_model or args.load_best_model_at_end):
                    trainer.ema.save(part)
    except BaseException:
        shutil.rmtree(part.parent, ignore_errors=True)
        raise
    wait()
    if args.should_save:
        with naming_disk_errors(final):
            write_checksums(part)
            trainer.recorder.set_checkpoints_aside()
        move_into_place(part, final)
        remove_old_checkpoints(run, args.save_total_limit, state.best_model_checkpoint)
    wait()
    if args.local_process_index == 0 and part.is_dir():
        # On a machine that shares no disk with the first, its own processes resume from this copy.
        trainer.recorder.set_checkpoints_aside()
        move_into_place(part, final)


def save_model(
    trainer: SavingTrainer, save: Callable[..., None], output_dir: str | None, state_dict: dict[str, Tensor] | None
) -> None:
    """Save the model by Trainer's own method, and the heads of terms in separate files.

    Neither a hub token nor the draft of a model card is saved.

    Args:
        trainer: the ``JepaTrainer``.
        save: Trainer's own method, called with folder and state dict.
        output_dir: the folder; None for the run folder.
        state_dict: the full weights of a sharded model, heads among them; None for a model that is not sharded.
    """
    args = trainer.args
    state, head_state = (None, {}) if state_dict is None else split_state(state_dict)
    folder = Path(output_dir or str(args.output_dir))
    had_card = (folder / CARD_FILE).is_file()
    # Trainer pickles its arguments beside the model; the token must not be in them.
    token, args.hub_token = args.hub_token, None
    try:
        with without_heads(trainer.model) as heads:
            save(output_dir, state)
    finally:
        args.hub_token = token
    # Trainer calls this on every process, but saves on one.
    if not args.should_save:
        return
    save_generation_config(trainer.model, folder)
    if heads is not None:
        save_heads(head_state or heads.state_dict(), folder)
    if not had_card:
        # PEFT writes a draft of a card beside an adapter.
        (folder / CARD_FILE).unlink(missing_ok=True)


@contextmanager
def loading_heads(model: PreTrainedModel, folder: str) -> Iterator[None]:
    """Detach the heads of terms while Trainer loads the model inside the block; then load them from their own files."""
    with without_heads(model) as heads:
        yield
    if heads is not None:
        load_heads(heads, folder)


# -- resuming ----------------------------------------------------------------------------------------------------------


def check_loaded_weights(model: PreTrainedModel, load_result: Any) -> None:
    """Raise a ``ValueError`` for missing and unknown weights, of which transformers only warns.

    ``load_result`` is the return value of torch's ``load_state_dict``.
    """
    tensors = model.state_dict(keep_vars=True)
    missing = set(load_result.missing_keys) - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    lost = sorted(name for name in missing if name in tensors and id(tensors[name]) not in loaded)
    if lost or load_result.unexpected_keys:
        fault = f"{lost[0]} is missing" if lost else f"{sorted(load_result.unexpected_keys)[0]} is unknown"
        raise ValueError(f"its weights are those of another model: {fault}")


def check_adapter_weights(model: PreTrainedModel, checkpoint: Path) -> None:
    """Raise a ``ValueError`` if a ``checkpoint`` folder lacks weights of a PEFT ``model``, of which PEFT only warns."""
    # Sharded weights have other file names.
    is_adapter = hasattr(model, "peft_config") and (checkpoint / "adapter_model.safetensors").is_file()
    if is_adapter and (lost := missing_of_adapter(model, checkpoint)):
        raise ValueError(f"its weights are those of another adapter: {lost[0]} is missing")
