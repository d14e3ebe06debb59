"""A run's settings as ``transformers.TrainingArguments``."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from stepjepa.base.errors import UserError
from stepjepa.config.run import RunConfig
from stepjepa.config.trainer import usual_fields
from stepjepa.store.hub import check_online
from stepjepa.training.checks import check_arguments, launched_together

# Least width of a model for which autocast to bfloat16 is faster on a CPU that supports it; narrower ones lose more by
# conversions than their products gain (``python benchmarks/precision.py``).
BF16_WIDTH = 256
# Processes that collate micro-batches while a GPU computes; one would do for a small model.
GPU_WORKERS = 2


def bf16_by_default(run: RunConfig) -> bool:
    """Return whether a run names no precision, and so trains in bfloat16 on a CUDA device that supports it.

    A precision is named by a field of ``TrainingArguments``, also as False, by weights in float16, by DeepSpeed's
    configuration, or by ``accelerate launch``.
    """
    precision = {"bf16", "fp16", "tf32", "deepspeed"} & run.trainer.keys()
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return not precision and run.dtype != "float16" and launched == "no"


def with_launched_precision(run: RunConfig) -> RunConfig:
    """Return a run with the precision that ``accelerate launch`` names, unless the run names one.

    Accelerate takes it from the environment; as a setting it is also recorded, compared and repeated.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("bf16", "fp16") or {"bf16", "fp16"} & run.trainer.keys():
        return run
    return replace(run, trainer={**run.trainer, launched: True})


def cpu_multiplies_in_bf16() -> bool:
    """Return whether this machine's CPU multiplies matrices in bfloat16; False where torch (before 2.13) can't tell."""
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


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


def _cuda_device(values: Mapping[str, object]) -> bool:
    """Return whether training with these arguments runs on a CUDA device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda" and not values.get("use_cpu")


def _has_bf16() -> bool:
    """Return whether the CUDA device has bfloat16 in hardware; older ones emulate it slowly."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def training_arguments(run: RunConfig, has_eval: bool, **more: object) -> TrainingArguments:
    """Return the Trainer's arguments of a run; ``more`` replaces some of them.

    On a CUDA device a run trains in bfloat16 and collates in worker processes, unless it names other settings.

    Raises:
        UserError: transformers refuses them, or :func:`check_arguments` does.
    """
    values: dict[str, object] = {
        "output_dir": run.output_dir,
        "per_device_train_batch_size": run.batch_size,
        "gradient_accumulation_steps": run.grad_accum,
        "learning_rate": run.learning_rate,
        "num_train_epochs": run.num_epochs,
        "seed": run.finetune_seed,
        **usual_fields(),
        "disable_tqdm": not sys.stderr.isatty(),
    }
    if has_eval:
        values["eval_strategy"] = "epoch" if run.eval_steps is None else "steps"
        values["eval_steps"] = run.eval_steps
    values.update(run.trainer | more)
    if _cuda_device(values):
        values = {"dataloader_num_workers": GPU_WORKERS, **values}
        if bf16_by_default(run) and _has_bf16():
            values["bf16"] = True
    if values.get("push_to_hub"):
        check_online()
    if str(values.get("fsdp")).lower() == "true":
        # A configuration file says 'fsdp: true'; as a word it would be taken for one of the old options.
        values["fsdp"] = True
    if launched_together() and not torch.accelerator.is_available():
        # Without it transformers would have every process train a model of its own.
        values["use_cpu"] = True
    try:
        result = TrainingArguments(**values)
        if {"bf16", "fp16"} & run.trainer.keys():
            # A precision that the run names as false, too, comes before that of the environment.
            result.mixed_precision = "bf16" if result.bf16 else "fp16" if result.fp16 else "no"
        # Checked before data and model are prepared, which takes long.
        check_arguments(result)
        for tracker in get_reporting_integration_callbacks(result.report_to):
            tracker()
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    return result
