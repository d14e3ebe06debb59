"""A run's settings as ``transformers.TrainingArguments``."""

import sys
from collections.abc import Mapping

import torch
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from stepjepa.base.errors import UserError
from stepjepa.config.run import RunConfig
from stepjepa.config.trainer import changed_defaults
from stepjepa.running.precision import bf16_by_default, cuda_has_bf16
from stepjepa.store.hub import check_online
from stepjepa.training.argument_checks import check_arguments, launched_together

GPU_WORKERS = 2
"""Processes that collate micro-batches while a GPU computes; for a small model one is enough."""


def _cuda_device(values: Mapping[str, object]) -> bool:
    """Return whether training with these arguments runs on a CUDA device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda" and not values.get("use_cpu")


def training_arguments(run: RunConfig, has_eval: bool, **more: object) -> TrainingArguments:
    """Return the Trainer's arguments of a run; ``more`` replaces some of them.

    On a CUDA device a run trains in bfloat16 and collates in worker processes, unless it names other settings.

    Raises:
        UserError: transformers refuses them, or :func:`check_arguments` does.
    """
    values = _values(run, has_eval, **more)
    _check_best(values, has_eval)
    if values.get("push_to_hub"):
        check_online()
    try:
        result = TrainingArguments(**values)
        if {"bf16", "fp16"} & run.trainer.keys():
            # A precision that the run names, also as False, comes before that of the environment.
            result.mixed_precision = "bf16" if result.bf16 else "fp16" if result.fp16 else "no"
        # Checked before data and model are prepared, which takes long.
        check_arguments(result)
        for tracker in get_reporting_integration_callbacks(result.report_to):
            tracker()
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    return result


def _check_best(values: Mapping[str, object], has_eval: bool) -> None:
    """Raise a ``UserError`` for a best checkpoint without held-out records, or saved at other steps than measured.

    Transformers says which strategies differ, and not which settings make them equal.
    """
    if not values.get("load_best_model_at_end"):
        return
    if not has_eval:
        remedy = "set `eval_file`, or `data_file` in place of `train_file`"
        raise UserError(f"`load_best_model_at_end` needs held-out records to choose by; {remedy}")
    evaluates, saves = values.get("eval_strategy"), values.get("save_strategy", "steps")
    if saves not in (evaluates, "best"):
        got = f"got `eval_strategy {evaluates}` and `save_strategy {saves}`; set `save_strategy {evaluates}`"
        raise UserError(f"`load_best_model_at_end` needs a checkpoint at each evaluation, {got}")


def _values(run: RunConfig, has_eval: bool, **more: object) -> dict[str, object]:
    """Return the fields of ``TrainingArguments`` that a run sets, by name."""
    values: dict[str, object] = {
        "output_dir": run.output_dir,
        "per_device_train_batch_size": run.batch_size,
        "gradient_accumulation_steps": run.grad_accum,
        "learning_rate": run.learning_rate,
        "num_train_epochs": run.num_epochs,
        "seed": run.finetune_seed,
        **changed_defaults(),
        "disable_tqdm": not sys.stderr.isatty(),
    }
    if has_eval:
        if run.batch_size > 1:
            # A loss that compares pairs is on one scale with that of training only among as many of them.
            values["per_device_eval_batch_size"] = run.batch_size
        values["eval_strategy"] = "epoch" if run.eval_steps is None else "steps"
        values["eval_steps"] = run.eval_steps
    values.update(run.trainer | more)
    if _cuda_device(values):
        values = {"dataloader_num_workers": GPU_WORKERS, **values}
        if bf16_by_default(run) and cuda_has_bf16():
            values["bf16"] = True
    if str(values.get("fsdp")).lower() == "true":
        # A configuration file has 'fsdp: true'; as a word it would be read as one of the old options.
        values["fsdp"] = True
    if launched_together() and not torch.accelerator.is_available():
        # Without it transformers would have every process train a model of its own.
        values["use_cpu"] = True
    return values
