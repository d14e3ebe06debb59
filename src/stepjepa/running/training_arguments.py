"""A run's settings as ``transformers.TrainingArguments``."""

import re
import sys
from collections.abc import Collection, Mapping
from json import JSONDecodeError
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK

from stepjepa.base.errors import UserError
from stepjepa.config.run import RunConfig
from stepjepa.config.trainer import changed_defaults
from stepjepa.running.precision import bf16_by_default, cuda_has_bf16
from stepjepa.store.hub import check_online
from stepjepa.training.argument_checks import check_arguments, launched_together
from stepjepa.training.metric_checks import LESS_IS_BETTER

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
    result = _accepted(values, [*run.trainer, *more])
    try:
        if {"bf16", "fp16"} & run.trainer.keys():
            # A precision that the run names, also as False, comes before that of the environment.
            result.mixed_precision = "bf16" if result.bf16 else "fp16" if result.fp16 else "no"
        # Checked before data and model are prepared, which takes long.
        check_arguments(result)
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    _check_trackers(result.report_to)
    return result


_REFUSALS = (ValueError, ImportError, TypeError, RuntimeError, OSError)
"""Errors of transformers for values that it does not take."""


def _accepted(values: dict[str, object], names: Collection[str]) -> TrainingArguments:
    """Return the Trainer's arguments; ``UserError`` that names the field if transformers refuses one of ``names``."""
    try:
        return TrainingArguments(**values)
    except _REFUSALS as error:
        message = " ".join(str(error).split())
        of_file = isinstance(error, OSError | JSONDecodeError)
        if not of_file and any(re.search(rf"\b{name}\b", message) for name in names):
            raise UserError(message) from None
        # Of settings that need each other, such as fsdp and fsdp_config, the one that names the file.
        suspects = [name for name in names if isinstance(values[name], str) or not of_file]
        refused = next((name for name in suspects if _takes(values, without=name)), None)
        if refused is None:
            raise UserError(message) from None
        if of_file:
            fault = getattr(error, "strerror", None) or getattr(error, "msg", message)
            message = f"expected a JSON object, or the name of a file of one, got {values[refused]!r} ({fault})"
        raise UserError(f"{refused}: {message}") from None


def _takes(values: Mapping[str, Any], without: str) -> bool:
    """Return whether transformers takes the values without one field."""
    try:
        TrainingArguments(**{name: value for name, value in values.items() if name != without})
    except _REFUSALS:
        return False
    return True


def _check_trackers(names: Collection[str]) -> None:
    """Raise a ``UserError`` for a tracker that transformers does not know, or whose package is not installed."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise UserError(f"report_to: expected none, all, or one or more of {known}; got '{name}'")
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (ImportError, RuntimeError) as error:
            raise UserError(f"report_to: {' '.join(str(error).split())}") from None


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
    if str(values.get("metric_for_best_model")).removeprefix("eval_") in LESS_IS_BETTER:
        values = {"greater_is_better": False, **values}
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
