"""Weights in 4 or 8 bits through bitsandbytes, to train an adapter on them (QLoRA, arXiv 2305.14314) or for inference.

``peft.prepare_model_for_kbit_training`` is not needed: PEFT freezes everything but the adapter, ``add_lora`` lets
gradients reach the embedding's output, and checkpointing has its own flags. That function also converts norms,
embedding and head to float32, which costs gigabytes with a large vocabulary.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from typing import Any

import torch
from torch import nn

from stepjepa.errors import UserError

KINDS = ("4bit", "8bit")


def quantization_options(
    kind: str, compute: torch.dtype | None = None, device: str | torch.device | None = None
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that quantize weights.

    4-bit weights are NF4 with doubly quantized scales. The embedding and the head keep their dtype.

    Args:
        kind: ``4bit`` or ``8bit``.
        compute: dtype of products with 4-bit weights; None for bfloat16 if there is an accelerator, else float32.
            Products with 8-bit weights choose their own.
        device: where the weights go; None for the accelerator, or the CPU if there is none.

    Raises:
        UserError: bitsandbytes is not installed.
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"quantization: expected one of {', '.join(KINDS)}, got '{kind}'")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"--load_in_{kind} needs bitsandbytes, which is not installed; run 'pip install bitsandbytes' or leave the "
            "flag out"
        )
    from transformers import BitsAndBytesConfig

    if kind == "4bit":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute or (torch.bfloat16 if torch.accelerator.is_available() else torch.float32),
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
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
