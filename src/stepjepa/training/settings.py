"""The arguments of transformers' Trainer, made of the flags of ``stepjepa train``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from stepjepa.errors import UserError
from stepjepa.models.loading import LoraSettings
from stepjepa.run_folder import is_main_process
from stepjepa.training.hub import refuse_offline
from stepjepa.training.preparation import refuse_contradictions
from stepjepa.training.processes import launched_together, open_group


def training_arguments(args: argparse.Namespace, has_eval: bool) -> TrainingArguments:
    """Our flags and those of transformers as one.

    Args:
        args: of ``commands.train``.
        has_eval: there are held-out records.

    Raises:
        UserError: transformers refuses them, or ``--eval_steps`` has nothing to act on.
    """
    values: dict[str, Any] = {
        "output_dir": args.output_dir,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.grad_accum,
        "learning_rate": args.learning_rate,
        "num_train_epochs": args.num_epochs,
        "seed": args.finetune_seed,
        "logging_steps": 10,
        "report_to": ["tensorboard"] if importlib.util.find_spec("tensorboard") else "none",
        # All processes say as much as the first.
        "log_level_replica": "passive",
        "disable_tqdm": not sys.stderr.isatty(),
    }
    if has_eval:
        values["eval_strategy"] = "epoch" if args.eval_steps is None else "steps"
        values["eval_steps"] = args.eval_steps
    elif args.eval_steps is not None:
        raise UserError("--eval_steps does nothing without --eval_file or --data_file; add one or leave it out")
    values.update(args.training)
    unused = sorted(name for name in args.training if name.startswith("hub_"))
    if values.get("push_to_hub"):
        refuse_offline()
    elif unused:
        raise UserError(f"--{unused[0]} does nothing without --push_to_hub; add it or leave it out")
    if str(values.get("fsdp")).lower() == "true":
        # A configuration file says 'fsdp: true'; as a word it would be taken for one of the old options.
        values["fsdp"] = True
    if values.get("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise UserError("--deepspeed requires deepspeed, which is not installed: pip install deepspeed")
    if launched_together() and not torch.accelerator.is_available() and not values.get("use_cpu"):
        # Without it transformers would have every process train a model of its own.
        values["use_cpu"] = True
        if is_main_process():
            print("note: no accelerator here, so the processes train on CPUs (--use_cpu)", file=sys.stderr)
    for name in ("bf16", "fp16"):
        if values.get(name) and not torch.accelerator.is_available() and not (name == "bf16" and values.get("use_cpu")):
            cpu = "; --use_cpu trains in bf16 on the CPU" if name == "bf16" else ""
            raise UserError(f"--{name} needs an accelerator, and none is found; leave it out{cpu}")
    open_group(cpu=bool(values.get("use_cpu")), seconds=values.get("ddp_timeout", TrainingArguments.ddp_timeout))
    try:
        made = TrainingArguments(**values)
        # Wrong settings and trackers that are unknown or not installed would end the run only after data and model are
        # prepared.
        refuse_contradictions(made)
        for tracker in get_reporting_integration_callbacks(made.report_to):
            tracker()
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    return made


def lora_settings(args: argparse.Namespace) -> LoraSettings | None:
    """Of the adapter that ``--lora`` asks for; None without."""
    chosen = (args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets, args.use_dora, args.use_rslora)
    return LoraSettings(*chosen) if args.lora else None
