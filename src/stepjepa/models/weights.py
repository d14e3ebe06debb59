"""Read weights completely or not at all, in full or quantized.

Weights that the libraries would fill with random numbers are refused. Weights in 4 or 8 bits (bitsandbytes) are for
training an adapter on them (QLoRA, arXiv 2305.14314) or for inference. ``peft.prepare_model_for_kbit_training`` is not
needed: PEFT freezes everything but the adapter, and ``loading.add_lora`` lets gradients reach the embedding's output.
That function also converts norms, embedding and head to float32, which costs gigabytes with a large vocabulary.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
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
    _refuse_nonfinite(model, name)
    if gguf_file is None:
        return model
    # The library refuses to save what it takes for a quantized model, so make another of the dequantised weights.
    del model.config.quantization_config
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    return fresh


def load_adapter(model: Any, folder: str) -> Any:
    """Load the PEFT adapter of a folder onto a model; UserError if weights are missing or not finite."""
    from peft import PeftModel

    try:
        wrapped = PeftModel.from_pretrained(model, folder)
        lost = missing_of_adapter(wrapped, Path(folder))
    except KeyError as error:  # PEFT looks up the rows of trained tokens by name
        lost = [str(error.args[0])]
    if lost:
        told = f"the adapter lacks {_named(lost)}, which would keep random initial values; get the complete file"
        raise UserError(told, path=folder)
    _refuse_nonfinite(wrapped, folder)
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


def _refuse_nonfinite(model: nn.Module, name: str) -> None:
    # A single one makes every answer meaningless.
    for key, value in model.named_parameters():
        if value.is_floating_point() and not value.is_meta and not bool(torch.isfinite(value).all()):
            raise UserError(f"the weights of '{name}' are not finite ({key}); take an earlier checkpoint")


def _kind(key: str) -> str:
    """The name of a weight, with ``N`` for layer numbers."""
    return re.sub(r"\.\d+(?=\.)", ".N", key)


def _named(keys: Iterable[str]) -> str:
    first, *others = sorted(keys)
    return shown(first) + (f" and {len(others)} more" if others else "")


# -- Quantized weights -------------------------------------------------------------------------------------------------


def quantization_options(
    kind: str, compute: torch.dtype | None = None, device: str | torch.device | None = None
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that quantize weights; the embedding and the head keep their dtype.

    Args:
        kind: ``4bit`` (NF4 with doubly quantized scales) or ``8bit``.
        compute: dtype of products with 4-bit weights; None for bfloat16 if there is an accelerator, else float32.
            Products with 8-bit weights choose their own.
        device: where the weights go; None for the accelerator, or the CPU if there is none.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"--load_in_{kind} needs bitsandbytes, which is not installed; run 'pip install bitsandbytes' or leave the "
            "flag out"
        )
    from transformers import BitsAndBytesConfig

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    config = BitsAndBytesConfig(
        load_in_4bit=kind == "4bit",
        load_in_8bit=kind == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute or (torch.bfloat16 if accelerator else torch.float32),
    )
    if device is None:
        device = "cpu" if accelerator is None else f"{accelerator.type}:{torch.accelerator.current_device_index()}"
    return {"quantization_config": config, "device_map": {"": str(device)}}


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Number of trained parameter values, and of all; two 4-bit values that share a byte count as two."""

    def size(parameter: nn.Parameter) -> int:
        state = getattr(parameter, "quant_state", None)
        return parameter.numel() if state is None else math.prod(state.shape)

    parameters = list(model.parameters())
    return sum(size(p) for p in parameters if p.requires_grad), sum(map(size, parameters))


def compute_dtype(dtype: str, *, bf16: bool, fp16: bool) -> torch.dtype:
    """The dtype of a run's matrix products: autocast's, else that of the weights that are not quantized."""
    if bf16 or (dtype in ("bfloat16", "auto") and not fp16):
        return torch.bfloat16
    return torch.float16 if fp16 or dtype == "float16" else torch.float32


def quantized(args: argparse.Namespace) -> str | None:
    """How the frozen weights are quantized: ``4bit``, ``8bit`` or None."""
    return "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None
