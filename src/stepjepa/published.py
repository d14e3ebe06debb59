"""Flags of the published scripts with another name or no effect here, so that published command lines run unchanged.

The page docs/published.md describes every such flag. Free of torch.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any, Literal

from stepjepa.arguments import note
from stepjepa.config import DEFAULTS
from stepjepa.errors import UserError
from stepjepa.options import as_arguments, option, options_of

ANSWERED = 50
"""Number of held-out records that ``--eval_accuracy`` answers if ``--eval_generate`` gives none."""

PAPER: dict[str, dict[str, Any]] = {
    "regular": {},
    "llm-jepa": {"predictors": 0, "layout": "separate"},
    "step-jepa": {"predictors": 1, "max_length": 1024},
}
"""Flags of ``--preset paper`` by mode: defaults of the published programs that differ from ours."""


def preset_arguments(args: argparse.Namespace) -> list[str]:
    """The flags that ``--preset`` stands for, to be put before all other flags, which override them.

    Args:
        args: the parsed flags of ``stepjepa train``.
    """
    if args.preset is None:
        return []
    mode = "step-jepa" if args.step_jepa else "regular" if args.regular else "llm-jepa"
    return as_arguments({"labels": "reference", "over_length": "truncate", **PAPER[mode]})


@dataclass
class TrainingFlags:
    """Flags of the published training scripts, for ``stepjepa train``."""

    preset: Literal["paper"] | None = option(
        None, "defaults of the published programs instead of ours: labels, predictors, length; named flags win"
    )
    linear: str | None = option(None, "random_span: short for --regular with --stp, weighted by --lbd", metavar="MODE")
    linear_predictor: bool = option(False, "not supported; an error says why")
    eval_accuracy: bool = option(False, "hold out --eval_split of --train_file and answer 50 records of it")
    wandb: bool = option(False, "short for --report_to wandb")
    wandb_project: str | None = option(None, "short for WANDB_PROJECT in the environment", metavar="NAME")
    wandb_run_name: str | None = option(None, "short for --run_name", metavar="NAME")
    no_save: bool = option(False, "short for --save_strategy no")


@dataclass
class EvaluationFlags:
    """Flags of the published evaluations without effect here: what they choose is detected, or never done."""

    original_model_name: str | None = option(None, "no effect: a run folder knows its tokenizer", metavar="NAME")
    nosplit_data: bool = option(False, "no effect: a test file is never split here")
    device_map: str | None = option(None, "no effect: see CUDA_VISIBLE_DEVICES", names=("device",), metavar="NAME")
    use_lora: bool = option(False, "no effect: a folder shows whether it holds an adapter")
    no_lora: bool = option(False, "no effect: a folder shows whether it holds an adapter")


def follow_training_flags(args: argparse.Namespace) -> None:
    """Translate published training flags into ours.

    Args:
        args: parsed flags of ``stepjepa train``, with ``training``; changed in place.

    Raises:
        UserError: a flag has no counterpart here, or contradicts another one.
    """
    if args.linear_predictor:
        raise UserError("--linear_predictor: Semantic Tube Prediction has no predictor layer here; leave it out")
    if args.linear is not None:
        _follow_tube(args)
    if args.eval_accuracy:
        _follow_accuracy(args)
    for name, field, value in (
        ("wandb", "report_to", "wandb"),
        ("wandb_run_name", "run_name", args.wandb_run_name),
        ("no_save", "save_strategy", "no"),
    ):
        if getattr(args, name):
            named = args.training.setdefault(field, value)
            if str(named) != value:
                raise UserError(f"--{name} means --{field} {value}, and --{field} {named} is named too; leave one out")
    if args.wandb_project is not None:
        os.environ["WANDB_PROJECT"] = args.wandb_project


def _follow_tube(args: argparse.Namespace) -> None:
    """Translate ``--linear random_span`` into ``--regular --stp`` with ``--lbd`` as the weight."""
    if args.linear != "random_span":
        raise UserError(f"--linear {args.linear}: only random_span is here; see --stp, or leave it out for LLM-JEPA")
    for name in ("regular", "step_jepa", "stp"):
        if getattr(args, name):
            raise UserError(f"--linear random_span means --regular --stp; leave --{name} out, or --linear")
    weight = DEFAULTS["lbd"] if args.lbd is None else args.lbd
    note(f"--linear random_span --lbd {weight} is --regular --stp {weight}")
    args.regular, args.stp, args.lbd, args.linear = True, weight, None, None


def _follow_accuracy(args: argparse.Namespace) -> None:
    """Translate ``--eval_accuracy`` into ``--eval_generate`` on records held out of the training file."""
    said = ""
    if args.train_file is not None and args.eval_file is None:
        args.data_file, args.train_file, args.split_seed = args.train_file, None, args.finetune_seed
        said = f"--data_file {args.data_file} --eval_split {args.eval_split} --split_seed {args.split_seed} "
    args.eval_generate = ANSWERED if args.eval_generate is None else args.eval_generate
    args.eval_accuracy = False
    note(f"--eval_accuracy is {said}--eval_generate {args.eval_generate}")


def follow_evaluation_flags(args: argparse.Namespace) -> None:
    """Check the published evaluation flags, and print a note for those that are set.

    Args:
        args: the parsed flags of ``stepjepa evaluate``.

    Raises:
        UserError: ``--device_map`` names a device other than auto or cuda.
    """
    if args.device_map is not None and args.device_map.split(":")[0] not in ("auto", "cuda"):
        raise UserError(
            f"--device_map {args.device_map}: expected auto or cuda; for the CPU set CUDA_VISIBLE_DEVICES to nothing"
        )
    idle = [f"--{each.name}" for each in options_of(EvaluationFlags) if getattr(args, each.name)]
    if idle:
        note(f"{', '.join(idle)}: no effect here; see docs/published.md")
