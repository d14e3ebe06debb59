"""Weights in 4 or 8 bits through bitsandbytes: to train an adapter on them (QLoRA, arXiv 2305.14314), and to answer.

``peft.prepare_model_for_kbit_training`` is not needed: PEFT freezes everything but the adapter, ``add_lora`` lets the
embedding's output have a gradient, checkpointing has flags of its own, and turning norms, embedding and head into
float32, as it does, costs gigabytes where a vocabulary is large.
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
    """What ``from_pretrained`` must be told.

    Four bits are NF4 with doubly quantized scales. The embedding and the head keep their dtype.

    Args:
        kind: ``4bit`` or ``8bit``.
        compute: dtype of products in 4 bits; None for bfloat16 where the accelerator has it, else float32. Products in
            8 bits choose their own.
        device: where the weights go; None for the accelerator, or the CPU where there is none.

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
    """How many values a model's parameters have: those that are trained, and all. In 4 bits two share a byte."""

    def size(parameter: nn.Parameter) -> int:
        state = getattr(parameter, "quant_state", None)
        return parameter.numel() if state is None else math.prod(state.shape)

    parameters = list(model.parameters())
    return sum(size(p) for p in parameters if p.requires_grad), sum(map(size, parameters))


def compute_dtype(dtype: str, *, bf16: bool, fp16: bool) -> torch.dtype:
    """The dtype of products for a run: of autocast, else that of the weights that are not quantized."""
    if bf16 or (dtype in ("bfloat16", "auto") and not fp16):
        return torch.bfloat16
    return torch.float16 if fp16 or dtype == "float16" else torch.float32


def quantized(args: argparse.Namespace) -> str | None:
    """How the frozen weights are quantized: ``4bit``, ``8bit`` or None."""
    return "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None
