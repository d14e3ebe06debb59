"""Flags of the published scripts that have another name here, or nothing to act on: followed, or said to be idle.

So that a published command line runs as it stands. The page docs/published.md says what became of every flag. Free of
torch.
"""

# option() makes the field

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

from stepjepa.config import DEFAULTS
from stepjepa.errors import UserError
from stepjepa.flag_files import as_arguments
from stepjepa.options import option

ANSWERED = 50
"""Held-out records that the published ``--eval_accuracy`` answers where no number is named."""

IDLE = ("original_model_name", "nosplit_data", "device_map", "device", "use_lora", "no_lora")
"""Flags of the published evaluations that choose what is found out here, or never done."""


PAPER: dict[str, Any] = {"labels": "reference", "over_length": "truncate"}
"""What ``--preset paper`` stands for in every mode: the labels of the published collator, records cut at the limit."""

PAPER_OF_MODE: dict[str, dict[str, Any]] = {
    "regular": {},
    "llm-jepa": {"predictors": 0, "layout": "separate"},
    "step-jepa": {"predictors": 1, "max_length": 1024},
}
"""... and in each: the defaults of the published programs where ours are others."""


def preset_arguments(args: argparse.Namespace) -> list[str]:
    """The flags that ``--preset`` stands for, to be put before all others, which then win.

    Args:
        args: of ``commands.train``, as named.
    """
    if args.preset is None:
        return []
    mode = "step-jepa" if args.step_jepa else "regular" if args.regular else "llm-jepa"
    return as_arguments({**PAPER, **PAPER_OF_MODE[mode]})


@dataclass
class TrainingFlags:
    """Flags of the published training scripts, for ``stepjepa train``."""

    preset: Literal["paper"] | None = option(
        None, "defaults of the published programs instead of ours: labels, predictors, length; named flags win"
    )
    linear: str | None = option(None, "random_span: short for --regular with --stp, weighted by --lbd", metavar="MODE")
    linear_predictor: bool = option(False, "not here; refused with a reason")
    eval_accuracy: bool = option(False, "hold out --eval_split of --train_file and answer 50 records of it")
    wandb: bool = option(False, "short for --report_to wandb")
    wandb_project: str | None = option(None, "short for WANDB_PROJECT in the environment", metavar="NAME")
    wandb_run_name: str | None = option(None, "short for --run_name", metavar="NAME")
    no_save: bool = option(False, "short for --save_strategy no")


@dataclass
class EvaluationFlags:
    """Flags of the published evaluations, for ``stepjepa evaluate``."""

    original_model_name: str | None = option(None, "nothing: a run folder knows its tokenizer", metavar="NAME")
    nosplit_data: bool = option(False, "nothing: a test file is never split here")
    device_map: str | None = option(None, "nothing: see CUDA_VISIBLE_DEVICES", names=("device",), metavar="NAME")
    use_lora: bool = option(False, "nothing: a folder shows whether it holds an adapter")
    no_lora: bool = option(False, "nothing, likewise")


def follow_training_flags(args: argparse.Namespace) -> None:
    """Put into our flags what the published ones mean.

    Args:
        args: of ``commands.train``, with ``training``; changed in place, and unchanged the second time.

    Raises:
        UserError: a flag has no counterpart here, or contradicts another one.
    """
    _follow_tube(args)
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
    """``--linear random_span``: the tube instead of the views, ``--lbd`` as its weight."""
    if args.linear_predictor:
        raise UserError("--linear_predictor: Semantic Tube Prediction has no map of its own here; leave it out")
    if args.linear is None:
        return
    if args.linear != "random_span":
        raise UserError(f"--linear {args.linear}: only random_span is here; see --stp, or leave it out for LLM-JEPA")
    for name in ("regular", "step_jepa", "stp"):
        if getattr(args, name):
            raise UserError(f"--linear random_span means --regular --stp; leave --{name} out, or --linear")
    weight = DEFAULTS["lbd"] if args.lbd is None else args.lbd
    print(f"note: --linear random_span --lbd {weight} is --regular --stp {weight}", file=sys.stderr)
    args.regular, args.stp, args.lbd, args.linear = True, weight, None, None


def _follow_accuracy(args: argparse.Namespace) -> None:
    """``--eval_accuracy``: answers during training, to records held out of the training file."""
    if not args.eval_accuracy:
        return
    said = ""
    if args.train_file is not None and args.eval_file is None:
        args.data_file, args.train_file, args.split_seed = args.train_file, None, args.finetune_seed
        said = f"--data_file {args.data_file} --eval_split {args.eval_split} --split_seed {args.split_seed} "
    args.eval_generate = ANSWERED if args.eval_generate is None else args.eval_generate
    args.eval_accuracy = False
    print(f"note: --eval_accuracy is {said}--eval_generate {args.eval_generate}", file=sys.stderr)


def follow_evaluation_flags(args: argparse.Namespace) -> None:
    """Put into our flags what the published ones mean, and say what has nothing to act on.

    Args:
        args: of ``commands.evaluate``; changed in place.

    Raises:
        UserError: the answers are to be made on a device that this flag can't choose here.
    """
    if args.device_map is not None and args.device_map.split(":")[0] not in ("auto", "cuda"):
        raise UserError(
            f"--device_map {args.device_map}: expected auto or cuda; for the CPU set CUDA_VISIBLE_DEVICES to nothing"
        )
    idle = [f"--{name}" for name in IDLE if getattr(args, name, None)]
    if idle:
        print(f"note: nothing comes of {', '.join(idle)}; see docs/published.md", file=sys.stderr)
