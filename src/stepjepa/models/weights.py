"""Weights are loaded whole or not at all: what the libraries would fill with random numbers is refused here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepjepa.errors import UserError, shown


def load_weights(name: str, *, allow_missing: bool = False, gguf_file: str | None = None, **options: Any) -> Any:
    """A causal language model from safetensors, with all of its weights.

    Args:
        name: folder or hub id.
        allow_missing: weights that are not there are drawn at random, as the library does.
        gguf_file: a file there, to be dequantised, instead of safetensors.
        options: of ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        UserError: weights are missing, belong to further layers, or are not finite.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is refused below
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, output_loading_info=True, gguf_file=gguf_file, **options
        )
    finally:
        logging.set_verbosity(level)
    if found["missing_keys"] and not allow_missing:
        raise UserError(
            f"the weights of '{name}' lack {_named(found['missing_keys'])}, which would be random numbers; get them "
            "(or pass --allow_missing_weights to 'stepjepa train')"
        )
    # A model with fewer layers than its weights, say; single tensors of other kinds (buffers, other heads) are no harm.
    kinds = {_kind(key) for key in model.state_dict()}
    if further := [key for key in found["unexpected_keys"] if _kind(key) in kinds]:
        raise UserError(
            f"the weights of '{name}' have {_named(further)}, which its config.json leaves out; correct the number of "
            "layers there"
        )
    refuse_nonfinite(model, name)
    return model if gguf_file is None else _saveable(model)


def _saveable(model: Any) -> Any:
    """A model read from GGUF as one that the library saves: it refuses those that it takes for quantized."""
    from transformers import AutoModelForCausalLM

    del model.config.quantization_config
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    return fresh


def load_adapter(model: Any, folder: str) -> Any:
    """A model with the PEFT adapter of a folder, all of it.

    Raises:
        UserError: weights are missing or not finite.
    """
    from peft import PeftModel

    try:
        wrapped = PeftModel.from_pretrained(model, folder)
        lost = missing_of_adapter(wrapped, Path(folder))
    except KeyError as error:  # rows of trained tokens, which PEFT looks up by their name
        lost = [str(error.args[0])]
    if lost:
        raise UserError(f"the adapter lacks {_named(lost)}, which would be as they were drawn; get them", path=folder)
    refuse_nonfinite(wrapped, folder)
    return wrapped


def missing_of_adapter(model: Any, folder: Path) -> list[str]:
    """The weights of a PEFT model's adapter that its file lacks, of which PEFT only warns."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return []
    with safe_open(file, "pt") as weights:
        return sorted(set(get_peft_model_state_dict(model, save_embedding_layers=False)) - set(weights.keys()))


def refuse_nonfinite(model: nn.Module, name: str) -> None:
    """Refuse weights that are not finite, of which one is enough to make every answer meaningless.

    Raises:
        UserError: there is one; it is named.
    """
    for key, value in model.named_parameters():
        if value.is_floating_point() and not value.is_meta and not bool(torch.isfinite(value).all()):
            raise UserError(f"the weights of '{name}' are not finite ({key}); take an earlier checkpoint")


def _kind(key: str) -> str:
    """The name of a weight, for all layers alike."""
    return re.sub(r"\.\d+(?=\.)", ".N", key)


def _named(keys: Iterable[str]) -> str:
    first, *others = sorted(keys)
    return shown(first) + (f" and {len(others)} more" if others else "")
