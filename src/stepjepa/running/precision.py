"""The precision of a run: its own setting, that of ``accelerate launch``, or the default of its device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from stepjepa.config.run import RunConfig

if TYPE_CHECKING:
    from transformers import TrainingArguments

BF16_WIDTH = 256
"""Smallest width of a model for which autocast to bfloat16 is faster on a CPU that supports it.

Narrower models lose more by conversions than their products gain (``python benchmarks/precision.py``).
"""


def _launched_precision() -> str:
    """Return the precision that ``accelerate launch`` passes on in the environment; ``no`` without."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def bf16_by_default(run: RunConfig) -> bool:
    """Return whether a run names no precision, and so trains in bfloat16 on a CUDA device that supports it.

    A precision is named by a field of ``TrainingArguments``, also as False, by weights in float16, by DeepSpeed's
    configuration, or by ``accelerate launch``.
    """
    named = {"bf16", "fp16", "tf32", "deepspeed"} & run.trainer.keys()
    return not named and run.dtype != "float16" and _launched_precision() == "no"


def with_launched_precision(run: RunConfig) -> RunConfig:
    """Return a run with the precision that ``accelerate launch`` names, unless the run names one.

    Accelerate takes it from the environment; as a setting it is also recorded, compared and repeated.
    """
    launched = _launched_precision()
    if launched not in ("bf16", "fp16") or {"bf16", "fp16"} & run.trainer.keys():
        return run
    return replace(run, trainer={**run.trainer, launched: True})


def cpu_multiplies_in_bf16() -> bool:
    """Return whether this machine's CPU multiplies matrices in bfloat16; False where torch (before 2.13) can't tell."""
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def describe_precision(run: RunConfig, training: TrainingArguments, width: int) -> str | None:
    """Describe the precision of matrix products if the run names none, or a faster one; None for float32.

    Args:
        run: the run.
        training: the Trainer's arguments of the run.
        width: width of the model's hidden states.
    """
    if training.bf16 and bf16_by_default(run):
        return "bfloat16 (autocast), the default on this device; `bf16 false` trains in float32"
    return bf16_advice(run, width, training.device.type)


def bf16_advice(run: RunConfig, width: int, device_type: str) -> str | None:
    """Return advice if a run names no precision, and autocast to bfloat16 would be faster than its float32.

    Args:
        run: the run.
        width: width of the model's hidden states.
        device_type: type of the training device.
    """
    if device_type != "cpu" or not bf16_by_default(run) or width < BF16_WIDTH or not cpu_multiplies_in_bf16():
        return None
    return "float32; `bf16 true` is faster here, since this CPU multiplies in bfloat16 (docs/performance.md)"


def cuda_has_bf16() -> bool:
    """Return whether the CUDA device has bfloat16 in hardware; older ones emulate it slowly."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
