"""Flags of the published scripts with another name or no effect here, so that published command lines run unchanged.

The page docs/published.md describes every such flag. Free of torch.
"""

import argparse
import os
from dataclasses import dataclass
from typing import Literal

from stepjepa.base.errors import UserError
from stepjepa.cli.flags import note
from stepjepa.config.jepa import DEFAULTS
from stepjepa.config.option import as_arguments, option, options_of


def preset_arguments(args: argparse.Namespace) -> list[str]:
    """What ``--preset`` and the published ``--infonce`` stand for, put before all other flags, which override it."""
    # The published InfoNCE divides by this, whatever our default is.
    loss = {"infonce_temperature": 0.07} if args.infonce and not args.regular else {}
    if args.preset is None:
        return as_arguments(loss)
    own = {"predictors": 1, "max_length": 1024} if args.step_jepa else {"predictors": 0, "layout": "separate"}
    # What stands for --regular and for --labels all is named, too.
    own = {} if args.regular or args.linear else own
    labels = {} if args.train_all else {"labels": "reference"}
    return as_arguments({**labels, "over_length": "truncate", **own, **loss})


@dataclass
class TrainingFlags:
    """Flags of the published training scripts, for ``stepjepa train``."""

    preset: Literal["paper"] | None = option(
        None, "defaults of the published programs instead of ours: labels, predictors, length; named flags win"
    )
    linear: Literal["random_span"] | None = option(None, "short for --regular with --stp, weighted by --lbd")
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
    split_tune_untune: bool = option(False, "no effect: --similarity tells right and wrong answers apart anyway")
    nosplit_data: bool = option(False, "no effect: a test file is never split here")
    device_map: str | None = option(None, "no effect: see CUDA_VISIBLE_DEVICES", names=("device",), metavar="NAME")
    use_lora: bool = option(False, "no effect: a folder shows whether it holds an adapter")
    no_lora: bool = option(False, "no effect: a folder shows whether it holds an adapter")


def follow_training_flags(args: argparse.Namespace) -> None:
    """Translate published training flags into ours, in place; ``UserError`` for a contradiction."""
    if args.linear_predictor:
        raise UserError("--linear_predictor: Semantic Tube Prediction has no predictor layer here; leave it out")
    if args.linear is not None:
        if named := [name for name in ("regular", "step_jepa", "stp") if getattr(args, name)]:
            raise UserError(f"--linear random_span means --regular --stp; leave --{named[0]} out, or --linear")
        weight = DEFAULTS["lbd"] if args.lbd is None else args.lbd
        note(f"--linear random_span --lbd {weight} is --regular --stp {weight}")
        args.regular, args.stp, args.lbd, args.linear = True, weight, None, None
    if args.eval_accuracy:
        said = ""
        if args.train_file is not None and args.eval_file is None:
            args.data_file, args.train_file, args.split_seed = args.train_file, None, args.finetune_seed
            said = f"--data_file {args.data_file} --eval_split {args.eval_split} --split_seed {args.split_seed} "
        args.eval_accuracy, args.eval_generate = False, args.eval_generate or 50
        note(f"--eval_accuracy is {said}--eval_generate {args.eval_generate}")
    for name, field, value in (
        ("wandb", "report_to", "wandb"),
        ("wandb_run_name", "run_name", args.wandb_run_name),
        ("no_save", "save_strategy", "no"),
    ):
        if getattr(args, name) and args.training.setdefault(field, value) not in (value, [value]):
            raise UserError(f"--{name} means --{field} {value}, and another --{field} is named too; leave one out")
    if args.wandb_project is not None:
        os.environ["WANDB_PROJECT"] = args.wandb_project


def follow_evaluation_flags(args: argparse.Namespace) -> None:
    """Print a note for published evaluation flags."""
    if idle := [f"--{each.name}" for each in options_of(EvaluationFlags) if getattr(args, each.name)]:
        note(f"{', '.join(idle)}: no effect here; see docs/published.md")
