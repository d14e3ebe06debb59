"""Load weights completely or not at all: refuse weights that the libraries would fill with random numbers."""

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
    """Load a causal language model from safetensors, with all of its weights.

    Args:
        name: folder or hub id.
        allow_missing: draw missing weights at random, as the library does.
        gguf_file: a GGUF file of ``name`` to read and dequantise, instead of safetensors.
        options: of ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        UserError: weights are missing, belong to layers that the configuration lacks, or are not finite.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the problems that it warns of are refused below
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, output_loading_info=True, gguf_file=gguf_file, **options
        )
    finally:
        logging.set_verbosity(level)
    if found["missing_keys"] and not allow_missing:
        raise UserError(
            f"the weights of '{name}' lack {_named(found['missing_keys'])}, which would be initialised at random; get "
            "the complete weights (or pass --allow_missing_weights to 'stepjepa train')"
        )
    # Refuse layers beyond the configuration's, for example; ignore other single tensors (buffers, other heads).
    kinds = {_kind(key) for key in model.state_dict()}
    if further := [key for key in found["unexpected_keys"] if _kind(key) in kinds]:
        raise UserError(
            f"the weights of '{name}' have {_named(further)}, which the model of its config.json does not have; "
            "correct the number of layers there"
        )
    refuse_nonfinite(model, name)
    return model if gguf_file is None else _saveable(model)


def _saveable(model: Any) -> Any:
    """Rebuild a model read from GGUF so that the library can save it; it refuses models that it takes for quantized."""
    from transformers import AutoModelForCausalLM

    del model.config.quantization_config
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    return fresh


def load_adapter(model: Any, folder: str) -> Any:
    """Load the PEFT adapter of a folder onto a model, with all of its weights.

    Raises:
        UserError: weights are missing or not finite.
    """
    from peft import PeftModel

    try:
        wrapped = PeftModel.from_pretrained(model, folder)
        lost = missing_of_adapter(wrapped, Path(folder))
    except KeyError as error:  # PEFT looks up the rows of trained tokens by name
        lost = [str(error.args[0])]
    if lost:
        told = f"the adapter lacks {_named(lost)}, which would keep random initial values; get the complete file"
        raise UserError(told, path=folder)
    refuse_nonfinite(wrapped, folder)
    return wrapped


def missing_of_adapter(model: Any, folder: Path) -> list[str]:
    """Weights of a PEFT model's adapter that its file lacks; PEFT itself only warns of them."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return []
    with safe_open(file, "pt") as weights:
        return sorted(set(get_peft_model_state_dict(model, save_embedding_layers=False)) - set(weights.keys()))


def refuse_nonfinite(model: nn.Module, name: str) -> None:
    """Refuse weights that are not finite: a single one makes every answer meaningless.

    Raises:
        UserError: a weight is not finite; the message names it.
    """
    for key, value in model.named_parameters():
        if value.is_floating_point() and not value.is_meta and not bool(torch.isfinite(value).all()):
            raise UserError(f"the weights of '{name}' are not finite ({key}); take an earlier checkpoint")


def _kind(key: str) -> str:
    """The name of a weight, with ``N`` for layer numbers."""
    return re.sub(r"\.\d+(?=\.)", ".N", key)


def _named(keys: Iterable[str]) -> str:
    first, *others = sorted(keys)
    return shown(first) + (f" and {len(others)} more" if others else "")
