"""A run's settings as ``transformers.TrainingArguments``."""

import os
import sys
from collections.abc import Mapping

import torch
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from stepjepa.base.errors import UserError
from stepjepa.config.run import RunConfig
from stepjepa.config.trainer import usual_fields
from stepjepa.store.hub import refuse_offline
from stepjepa.training.checks import launched_together, refuse_contradictions

# Processes that collate micro-batches while a GPU computes; one would do for a small model.
GPU_WORKERS = 2


def bf16_by_default(run: RunConfig) -> bool:
    """Whether a run names no precision, and so trains in bfloat16 where it has a CUDA device that can.

    Named are the fields of ``TrainingArguments``, also as False; weights in float16; the precision of DeepSpeed's
    configuration, and that of ``accelerate launch``.
    """
    named = {"bf16", "fp16", "tf32", "deepspeed"} & run.trainer.keys()
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return not named and run.dtype != "float16" and launched == "no"


def _cuda_device(values: Mapping[str, object]) -> bool:
    """Whether training with these arguments runs on a CUDA device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda" and not values.get("use_cpu")


def _has_bf16() -> bool:
    """Whether the CUDA device computes in bfloat16 itself; older ones emulate it slowly."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def training_arguments(run: RunConfig, has_eval: bool, **more: object) -> TrainingArguments:
    """Return the Trainer's arguments of a run; ``more`` replaces some of them.

    On a CUDA device a run trains in bfloat16 and collates in processes of their own, unless it names others.

    Raises:
        UserError: transformers refuses them, or :func:`refuse_contradictions` does.
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
        refuse_offline()
    if str(values.get("fsdp")).lower() == "true":
        # A configuration file says 'fsdp: true'; as a word it would be taken for one of the old options.
        values["fsdp"] = True
    if launched_together() and not torch.accelerator.is_available():
        # Without it transformers would have every process train a model of its own.
        values["use_cpu"] = True
    try:
        made = TrainingArguments(**values)
        # Here, since data and model take long to prepare.
        refuse_contradictions(made)
        for tracker in get_reporting_integration_callbacks(made.report_to):
            tracker()
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    return made
