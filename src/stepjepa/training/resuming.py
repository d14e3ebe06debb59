"""What a checkpoint holds that can't be loaded is said in one line, with the checkpoint's name and the way on."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import Trainer

from stepjepa.errors import UserError

# What PyTorch, safetensors, transformers and pickle raise where a file holds something else than it should.
_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, EOFError, RuntimeError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError),
)

# What AdamW and SGD remember of a weight.
_LIKE_WEIGHTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@contextmanager
def naming_damage(checkpoint: str | None) -> Iterator[None]:
    """Say of what can't be loaded which checkpoint it is in.

    Args:
        checkpoint: that is loaded inside; None for none, where errors stay as they are.

    Raises:
        UserError: in the place of whatever is raised inside, but for a full memory and disks that can't be read.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except _DAMAGE as error:
        if checkpoint is None:
            raise
        told = (str(error).strip().splitlines() or [""])[0].strip().rstrip(".:")
        raise UserError(
            f"can't be gone on from ({type(error).__name__}: {told}); move it elsewhere, and go on from the one before "
            "it with --resume_from_checkpoint last",
            path=checkpoint,
        ) from error


class ResumingTrainer(Trainer):
    """transformers' Trainer, which says what is wrong with a checkpoint that it goes on from.

    Whether a checkpoint is whole, ``checkpoints.checkpoint_fault`` has looked at; here are files that are whole and
    hold something else: those of another model, or with other names.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with naming_damage(resume_from_checkpoint):
            if hasattr(self.model, "peft_config"):
                _refuse_other_adapter(self.model, Path(resume_from_checkpoint))
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuses what transformers warns of: what is missing would go on from where the model began.

        Raises:
            ValueError: a weight that no other is tied to is missing, or there is one that the model has not.
        """
        tensors = self.model.state_dict(keep_vars=True)
        missing = set(load_result.missing_keys) - set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
        lost = sorted(name for name in missing if name in tensors and id(tensors[name]) not in loaded)
        if lost or load_result.unexpected_keys:
            what = f"{lost[0]} is missing" if lost else f"{sorted(load_result.unexpected_keys)[0]} is unknown"
            raise ValueError(f"its weights are those of another model: {what}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with naming_damage(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                _refuse_other_shapes(self.optimizer)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with naming_damage(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with naming_damage(checkpoint):
            super()._load_rng_state(checkpoint)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        # Anything but what a checkpoint says of itself is the same with and without one.
        checkpoint = next((each for each in (*args, *kwargs.values()) if isinstance(each, str)), None)
        with naming_damage(checkpoint):
            return super()._init_training_state(*args, **kwargs)


def _refuse_other_adapter(model: Any, checkpoint: Path) -> None:
    """Refuse an adapter's weights that lack some of the model's, of which PEFT only warns.

    Raises:
        ValueError: one is missing.
    """
    file = checkpoint / "adapter_model.safetensors"
    if not file.is_file():
        return
    with safe_open(file, "pt") as weights:
        lost = sorted(set(get_peft_model_state_dict(model, save_embedding_layers=False)) - set(weights.keys()))
    if lost:
        raise ValueError(f"its weights are those of another adapter: {lost[0]} is missing")


def _refuse_other_shapes(optimizer: Any) -> None:
    """Refuse what an optimizer remembers of other weights, which would be found out in its first step.

    Raises:
        ValueError: it has averages of another shape than a weight.
    """
    for group in getattr(optimizer, "param_groups", ()):
        for weight in group["params"]:
            for name, value in optimizer.state.get(weight, {}).items():
                # Factored and quantized averages have other shapes; what these keep has that of the weight.
                plain = type(value) is torch.Tensor and value.dtype.is_floating_point
                if name in _LIKE_WEIGHTS and plain and value.shape != weight.shape:
                    expected, got = tuple(weight.shape), tuple(value.shape)
                    raise ValueError(f"expected '{name}' of shape {expected} in the optimizer, got {got}")
