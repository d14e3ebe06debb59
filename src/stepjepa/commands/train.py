"""``stepjepa train``: the flags of training, ours first; everything else goes to ``transformers.TrainingArguments``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepjepa.arguments import (
    add_data_group,
    add_loss_group,
    add_model_group,
    add_objective_group,
    add_switch,
    arguments_of_file,
    jepa_config,
)
from stepjepa.config import DTYPES, JepaConfig
from stepjepa.errors import UserError
from stepjepa.parser import Parser
from stepjepa.published import add_training_flags, follow_training_flags, preset_arguments
from stepjepa.run_folder import FinishedError, is_main_process, read_run
from stepjepa.terminal import lines_to_stderr, print_json, print_rows

SUMMARY = "train a model: regular, LLM-JEPA or Step-JEPA"

EPILOG = """\
Every other field of transformers.TrainingArguments is a flag too: --report_to wandb, --fsdp, --bf16 ...
(stepjepa train --help_all lists them)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our flags, grouped."""
    parser.usage = "stepjepa train --train_file FILE --model_name NAME --output_dir DIR [flags below]"
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    data = add_data_group(parser, required=False)
    add_switch(data, "--streaming", help="read the records as they are trained on, keeping none; needs --max_steps")
    data.add_argument(
        "--shuffle_buffer_size",
        type=int,
        metavar="N",
        help="of --streaming: records to draw from; 0 shuffles none (1000)",
    )
    data.add_argument("--cache_dir", metavar="DIR", help="where prepared data is kept (~/.cache/stepjepa)")
    add_switch(data, "--no_cache", help="neither read nor keep prepared data")
    data.add_argument("--eval_file", metavar="FILE", help="held-out records, for losses during training")
    data.add_argument("--data_file", metavar="FILE", help="one file to be split, instead of --train_file, --eval_file")
    data.add_argument("--eval_split", type=float, default=0.2, metavar="S", help="share of --data_file held out (0.2)")
    data.add_argument("--split_seed", type=int, default=42, metavar="N", help="of that split (42)")
    model = add_model_group(parser, required=False)
    model.add_argument(
        "--dtype",
        default="float32",
        choices=DTYPES,
        help="of weights (float32)",
    )
    add_switch(model, "--pretrain", help="random weights, with the configuration of --model_name")
    model.add_argument(
        "--train_tokenizer", type=int, metavar="SIZE", help="with --pretrain: a tokenizer of that many tokens, trained"
    )
    model.add_argument("--attn_implementation", metavar="NAME", help="as in transformers: sdpa, eager ...")
    add_switch(model, "--lora", help="train a LoRA adapter and the predictor rows instead of all weights")
    model.add_argument("--lora_rank", type=int, default=16, metavar="R", help="(16)")
    model.add_argument("--lora_alpha", type=int, metavar="A", help="(twice the rank)")
    model.add_argument("--lora_dropout", type=float, default=0.0, metavar="P", help="(0)")
    add_switch(model, "--load_in_4bit", help="with --lora: frozen weights in 4 bits, through bitsandbytes (QLoRA)")
    add_switch(model, "--load_in_8bit", help="with --lora: frozen weights in 8 bits, through bitsandbytes")
    add_objective_group(parser)
    add_loss_group(parser)
    answers = parser.add_argument_group("answers during training")
    answers.add_argument(
        "--eval_generate",
        "--max_eval_samples",
        type=int,
        metavar="N",
        help="at every evaluation, also answer N held-out records and score",
    )
    answers.add_argument("--eval_task", default="auto", metavar="NAME", help="as --task of 'stepjepa evaluate' (auto)")
    answers.add_argument(
        "--eval_max_new_tokens",
        "--max_new_tokens_eval",
        type=int,
        default=256,
        metavar="N",
        help="cut answers off (256)",
    )
    answers.add_argument("--spider_path", metavar="DIR", help="databases, for the task spider")
    answers.add_argument(
        "--missing_databases", choices=("error", "skip"), default="error", help="skip: leave such records out (error)"
    )
    _add_run_group(parser)
    add_training_flags(parser)


def _add_run_group(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument("--output_dir", metavar="DIR", help="run folder; must be empty or new, unless resuming")
    run.add_argument("--batch_size", "--per_device_train_batch_size", type=int, default=4, metavar="N", help="(4)")
    run.add_argument("--grad_accum", "--gradient_accumulation_steps", type=int, default=4, metavar="N", help="(4)")
    run.add_argument("--learning_rate", type=float, default=2e-5, metavar="LR", help="(2e-5)")
    run.add_argument("--num_epochs", "--num_train_epochs", type=float, default=3.0, metavar="N", help="(3)")
    run.add_argument(
        "--eval_steps", "--eval_accuracy_steps", type=int, metavar="N", help="evaluate every N steps (once an epoch)"
    )
    run.add_argument("--finetune_seed", "--seed", type=int, default=42, metavar="N", help="of everything random (42)")
    add_switch(run, "--selective_checkpointing", help="keep products and attention, recompute the rest: less memory")
    run.add_argument(
        "--on_nonfinite",
        choices=("stop", "skip"),
        default="stop",
        help="before a step whose loss or gradient is not finite: stop, or skip the step (stop)",
    )
    add_switch(run, "--track_flop", help="measure the FLOPs of the first 10 steps, beside the derived ones")
    add_switch(run, "--same_flop", help="as many steps as spend the compute of --num_epochs of --regular")
    add_switch(run, "--dry_run", help="print tokens, memory and FLOPs of a step, with no weights made, and stop")
    run.add_argument("--resume_from_checkpoint", metavar="DIR", help="a checkpoint folder; last; auto: last, if any")
    add_switch(run, "--json", help="one JSON document on standard output at the end; lines go to standard error")
    run.add_argument("--debug", type=int, default=0, metavar="N", help="0 warnings, 1 progress, 2 details (0)")
    run.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line wins")
    run.add_argument("--help_all", action="store_true", help="also list the flags of TrainingArguments")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Ours to ``args``; the rest to ``args.training``, the fields of TrainingArguments that were named.

    ``args.given`` is the command line itself, and ``args.resolved`` the same with what ``--preset`` and ``--config``
    stand for before it.
    """
    given = list(arguments)
    first, _ = parser.parse_known_args(arguments)
    if first.help_all:
        parser.print_help()
        print("\nTrainingArguments:\n" + _training_parser().format_help().partition("options:")[2])
        raise SystemExit(0)
    if first.config is not None:
        flags = [option[2:] for action in parser._actions for option in action.option_strings if option[2:]]
        of_file, origins = arguments_of_file(first.config, [*flags, *_training_fields()])
        if isinstance(parser, Parser):
            parser.origins = origins
        arguments = [*of_file, *arguments]
        first, _ = parser.parse_known_args(arguments)
    arguments = [*preset_arguments(first), *arguments]
    args, rest = parser.parse_known_args(arguments)
    args.given, args.resolved = given, list(arguments)
    args.training = _parse_training(parser, rest) if rest else {}
    if missing := [f"--{name}" for name in ("model_name", "output_dir") if getattr(args, name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        parser.error(f"{' and '.join(missing)} {verb} missing; {parser.prog} --help says more")
    follow_training_flags(args)
    return args


# Fields of TrainingArguments that our own flags set; naming both would leave one of them without effect.
OURS = ("do_train", "do_eval", "do_predict", "remove_unused_columns", "label_names")


def _training_parser() -> Any:
    from transformers import HfArgumentParser, TrainingArguments

    return HfArgumentParser(TrainingArguments, add_help=False, allow_abbrev=False, argument_default=None)


def _training_fields() -> list[str]:
    from dataclasses import fields

    from transformers import TrainingArguments

    return [field.name for field in fields(TrainingArguments) if field.init and field.name not in OURS]


def _parse_training(parser: argparse.ArgumentParser, rest: Sequence[str]) -> dict[str, Any]:
    from stepjepa.parser import refuse_unknown

    inner = _training_parser()
    # Only what was named is passed on, so that our defaults are not overwritten by those of TrainingArguments.
    for action in inner._actions:
        action.default = argparse.SUPPRESS
        if action.dest == "report_to":
            # transformers' own parser takes one name alone.
            action.nargs = "+"
    inner.prog = parser.prog
    inner.error = lambda message: Parser.error(parser, message)  # type: ignore[arg-type]  # same one-line form
    known, unknown = inner.parse_known_args(rest)
    fields = _training_fields()
    if unknown:
        refuse_unknown(parser, unknown, [f"--{name}" for name in fields])
    named = vars(known)
    if len(named.get("report_to", ())) == 1:
        named["report_to"] = named["report_to"][0]
    if "hub_token" in named:
        # Every user of the machine can read a command line, and the run folder keeps it.
        parser.error("--hub_token would be read by others; leave it out and set HF_TOKEN in the environment")
    for name in named:
        if name in OURS:
            parser.error(f"--{name} has no effect here; leave it out")
    return named


def check(args: argparse.Namespace) -> JepaConfig:
    """What the flags describe, once all that can be said without reading data or a model has been checked.

    Raises:
        UserError: flags contradict each other, do nothing, or hold a wrong value.
    """
    config = jepa_config(args)
    if (args.train_file is None) == (args.data_file is None):
        raise UserError("name the data with either --train_file or --data_file")
    if args.data_file is not None and args.eval_file is not None:
        raise UserError("--data_file is split into both parts, so --eval_file can't stand beside it; leave one out")
    if not 0 < args.eval_split < 1:
        raise UserError(f"--eval_split: expected a share between 0 and 1, got {args.eval_split}")
    if args.data_file is None:
        for name, default in (("eval_split", 0.2), ("split_seed", 42)):
            if getattr(args, name) != default:
                raise UserError(f"--{name} does nothing without --data_file; add it or leave it out")
    if args.no_cache and args.cache_dir is not None:
        raise UserError("--no_cache keeps nothing, and --cache_dir says where; leave one out")
    _check_stream(args)
    if args.plain and args.chat_template is not None:
        raise UserError("--chat_template does nothing with --plain, which has no chat format; leave one out")
    if not 0 <= args.finetune_seed < 2**32:
        raise UserError(f"--finetune_seed: expected a whole number from 0 to {2**32 - 1}, got {args.finetune_seed}")
    for name in ("batch_size", "grad_accum"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}: expected 1 or more, got {getattr(args, name)}")
    _check_answers(args)
    _check_model(args)
    if args.same_flop and args.training.get("max_steps", -1) > 0:
        raise UserError("--same_flop works out the number of steps, and --max_steps names it; leave one out")
    return config


def _check_stream(args: argparse.Namespace) -> None:
    """Refuse what can't be known of a stream, and what has nothing to act on."""
    if not args.streaming:
        if args.shuffle_buffer_size is not None:
            raise UserError("--shuffle_buffer_size does nothing without --streaming; add it or leave it out")
        return
    if args.data_file is not None:
        raise UserError("--data_file is split, for which all records are needed; with --streaming pass --train_file")
    if args.training.get("max_steps", -1) < 1:
        raise UserError(
            "--streaming does not know how many records there are, so pass --max_steps N; a file that fits into memory "
            "needs no --streaming"
        )
    if args.num_epochs != 3.0:
        raise UserError("--num_epochs does nothing with --streaming, whose length --max_steps says; leave it out")
    if args.shuffle_buffer_size is not None and args.shuffle_buffer_size < 0:
        raise UserError(f"--shuffle_buffer_size: expected 0 or more, got {args.shuffle_buffer_size}")
    for name in ("cache_dir", "no_cache"):
        if getattr(args, name) and args.eval_file is None:
            raise UserError(f"--{name} does nothing with --streaming, which keeps nothing prepared; leave it out")
    for name in ("same_flop", "track_flop", "dry_run"):
        if getattr(args, name):
            raise UserError(
                f"--{name} needs the lengths of all records, which --streaming does not know; leave one out"
            )


def _check_model(args: argparse.Namespace) -> None:
    """Refuse ways of making the model that contradict each other."""
    preset = args.model_name.startswith("preset:")
    if args.lora and (preset or args.pretrain):
        raise UserError(
            f"--lora adapts a trained model, and {'presets have' if preset else '--pretrain means'} random weights; "
            "leave one out"
        )
    if not args.lora:
        defaults = {"lora_rank": 16, "lora_alpha": None, "lora_dropout": 0.0}
        for name, default in {**defaults, "load_in_4bit": False, "load_in_8bit": False}.items():
            if getattr(args, name) != default:
                raise UserError(f"--{name} does nothing without --lora; add --lora or leave it out")
    if args.load_in_4bit and args.load_in_8bit:
        raise UserError("--load_in_4bit and --load_in_8bit exclude each other; leave one out")
    if args.train_tokenizer is not None and not (preset or args.pretrain):
        raise UserError("--train_tokenizer needs random weights, which --pretrain makes; add it or leave both out")


def run(args: argparse.Namespace) -> int:
    """Check what can be checked cheaply, then train."""
    config = check(args)
    from stepjepa.training.processes import naming_lost_processes
    from stepjepa.training.run import train

    try:
        with lines_to_stderr(args.json), naming_lost_processes(Path(args.output_dir)):
            record = train(args, config)
    except FinishedError as finished:
        # To a job that is put back into the queue this is no error.
        if str(args.resume_from_checkpoint).lower() != "auto":
            raise
        if is_main_process():
            print(finished, file=sys.stderr)
            if args.json:
                _close(args, read_run(args.output_dir))
        return 0
    if record is not None and is_main_process():
        _close(args, record)
    return 0


def _close(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Say what came of the run, where it is, and what to do next."""
    from stepjepa.training.console import finished_json, last_lines, next_command

    if args.json:
        print_json(record if args.dry_run else finished_json(args, record))
        return
    if args.dry_run:
        return
    print_rows(last_lines(Path(args.output_dir), record))
    # On a line of its own, so that it can be copied from a terminal of any width.
    print(f"next: {shlex.join(next_command(args))}", flush=True)


def _check_answers(args: argparse.Namespace) -> None:
    """Refuse settings of answers that have nothing to act on."""
    if args.eval_generate is None:
        defaults = {"eval_task": "auto", "eval_max_new_tokens": 256, "spider_path": None, "missing_databases": "error"}
        for name, default in defaults.items():
            if getattr(args, name) != default:
                raise UserError(f"--{name} does nothing without --eval_generate; add it or leave it out")
        return
    if args.eval_file is None and args.data_file is None:
        raise UserError("--eval_generate needs held-out records; add --eval_file or --data_file")
    for name in ("eval_generate", "eval_max_new_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}: expected 1 or more, got {getattr(args, name)}")
