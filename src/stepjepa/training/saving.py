"""Checkpoints by atomic rename, and in one line what is wrong with one that can't be loaded."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from stepjepa.errors import UserError

# What PyTorch, safetensors, transformers and pickle raise where a file holds something else than it should.
_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, EOFError, RuntimeError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError),
)

# What AdamW and SGD remember of a weight.
_LIKE_WEIGHTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def give_name(part: Path, final: Path) -> None:
    """Put a finished checkpoint where it belongs, in the place of a damaged or an older one if there is one."""
    replaced = part.with_name(f"{part.name}.replaced")
    if final.exists():
        final.replace(replaced)
    part.replace(final)
    shutil.rmtree(part.parent)


@contextmanager
def naming_damage(checkpoint: str | None, loading: Callable[[], bool]) -> Iterator[None]:
    """Say of what can't be loaded which checkpoint it is in.

    Whether a checkpoint is whole, ``checkpoints.checkpoint_fault`` has looked at; here are files that are whole and
    hold something else: those of another model, or with other names.

    Args:
        checkpoint: that is loaded inside; None for none, where errors stay as they are.
        loading: whether it still is.

    Raises:
        UserError: in the place of whatever is raised inside while it is loaded, but for a full memory and disks that
            can't be read.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except _DAMAGE as error:
        if checkpoint is None or not loading():
            raise
        told = (str(error).strip().splitlines() or [""])[0].strip().rstrip(".:")
        raise UserError(
            f"can't be resumed ({type(error).__name__}: {told}); move it elsewhere, and resume the one before it with "
            "--resume_from_checkpoint last",
            path=checkpoint,
        ) from error


def refuse_other_weights(model: Any, load_result: Any) -> None:
    """Refuse what transformers only warns of: what is missing would go on from where the model began.

    Raises:
        ValueError: a weight that no other is tied to is missing, or there is one that the model has not.
    """
    tensors = model.state_dict(keep_vars=True)
    missing = set(load_result.missing_keys) - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    lost = sorted(name for name in missing if name in tensors and id(tensors[name]) not in loaded)
    if lost or load_result.unexpected_keys:
        what = f"{lost[0]} is missing" if lost else f"{sorted(load_result.unexpected_keys)[0]} is unknown"
        raise ValueError(f"its weights are those of another model: {what}")


def refuse_other_adapter(model: Any, checkpoint: Path) -> None:
    """Refuse an adapter's weights that lack some of the model's, of which PEFT only warns.

    Raises:
        ValueError: one is missing.
    """
    file = checkpoint / "adapter_model.safetensors"
    if not hasattr(model, "peft_config") or not file.is_file():
        return
    with safe_open(file, "pt") as weights:
        lost = sorted(set(get_peft_model_state_dict(model, save_embedding_layers=False)) - set(weights.keys()))
    if lost:
        raise ValueError(f"its weights are those of another adapter: {lost[0]} is missing")


def refuse_other_shapes(optimizer: Any) -> None:
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
