"""``stepjepa train``: train a model. Flags that are not ours go to ``transformers.TrainingArguments``."""

# ruff: noqa: RUF009  # option() makes the field

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepjepa.arguments import ModelFlags, add_training_data, jepa_config
from stepjepa.config import Dtype, JepaConfig
from stepjepa.errors import UserError
from stepjepa.flag_files import arguments_of_file
from stepjepa.options import FROM_ONE, READERS, SHARE, Range, add_options, option, refuse_without_effect
from stepjepa.parser import Parser, refuse_unknown
from stepjepa.published import TrainingFlags, follow_training_flags, preset_arguments
from stepjepa.run_folder import FinishedError, is_main_process, read_run
from stepjepa.terminal import lines_to_stderr, print_json, print_rows

SUMMARY = "train a model: regular, LLM-JEPA or Step-JEPA"

EPILOG = """\
example: stepjepa train --train_file train.jsonl --model_name preset:tiny \\
  --step_jepa --lbd 0.1 --output_dir runs/a
All fields of transformers.TrainingArguments are flags too, such as --bf16."""

COMMON = (
    *("train_file", "eval_file", "max_length", "model_name", "dtype", "lora"),
    *("regular", "step_jepa", "layout", "predictors", "lbd", "jepa_loss_type", "jepa_ratio", "eval_generate"),
    *("output_dir", "batch_size", "grad_accum", "learning_rate", "num_epochs", "eval_steps", "finetune_seed"),
    *("resume_from_checkpoint", "dry_run", "config"),
)
"""Options that ``--help`` shows."""

SEED: Range = (lambda value: 0 <= value < 2**32, f"a whole number from 0 to {2**32 - 1}")


@dataclass
class TrainData:
    """How records are read, and which are held out."""

    cache_dir: str | None = option(None, "folder for prepared data (~/.cache/stepjepa)", metavar="DIR")
    no_cache: bool = option(False, "do not use the cache of prepared data")
    eval_file: str | None = option(None, "held-out records, for losses during training", metavar="FILE")
    data_file: str | None = option(None, "one file to split, instead of --train_file, --eval_file", metavar="FILE")
    dataset: list[str] | None = option(
        None, "files, folders or hub data sets NAME:SUBSET:SPLIT, mixed; instead of --train_file", metavar="NAME"
    )
    dataset_weights: list[float] | None = option(
        None, "relative size of each data set; no record is repeated (all records)", metavar="W", only_with="dataset"
    )
    eval_split: float = option(0.2, "share of --data_file held out", allowed=SHARE, only_with="data_file")
    split_seed: int = option(42, "seed of the split, or of the mixture", only_with="data_file or dataset_weights")


@dataclass
class TrainedModel(ModelFlags):
    """Which model, and which of its weights are trained."""

    dtype: Dtype = option("float32", "dtype of the weights")
    allow_missing_weights: bool = option(False, "initialise weights that the model's files lack at random")
    pretrain: bool = option(False, "start from random weights; with the configuration of --model_name")
    train_tokenizer: int | None = option(None, "with --pretrain: train a tokenizer of SIZE tokens", metavar="SIZE")
    attn_implementation: str | None = option(None, "as in transformers: sdpa, eager ...", metavar="NAME")
    lora: bool = option(False, "train an adapter and the predictor rows; instead of all weights")
    lora_rank: int = option(16, "rank of the adapter", metavar="R", only_with="lora", allowed=FROM_ONE)
    lora_alpha: int | None = option(None, "scale of the adapter (twice the rank)", metavar="A", only_with="lora")
    lora_dropout: float = option(0.0, "dropout on the adapter's input", metavar="P", only_with="lora")
    lora_targets: str = option(
        "all-linear", "layers that get an adapter; q_proj,v_proj ...", metavar="NAMES", only_with="lora"
    )
    use_dora: bool = option(False, "DoRA instead of LoRA", only_with="lora")
    use_rslora: bool = option(False, "rsLoRA: scale by the root of the rank", only_with="lora")
    load_in_4bit: bool = option(False, "frozen weights in 4 bits, through bitsandbytes (QLoRA)", only_with="lora")
    load_in_8bit: bool = option(False, "frozen weights in 8 bits, through bitsandbytes", only_with="lora")


@dataclass
class AnswerFlags:
    """Answers to held-out records during training."""

    eval_generate: int | None = option(
        None,
        "at every evaluation, answer N held-out records; and score the answers",
        names=("max_eval_samples",),
        allowed=FROM_ONE,
    )
    eval_task: str = option("auto", "as --task of 'stepjepa evaluate'", metavar="NAME", only_with="eval_generate")
    eval_max_new_tokens: int = option(
        256, "most tokens of an answer", names=("max_new_tokens_eval",), allowed=FROM_ONE, only_with="eval_generate"
    )
    spider_path: str | None = option(None, "folder of Spider's databases", metavar="DIR", only_with="eval_generate")
    missing_databases: Literal["error", "skip"] = option(
        "error", "if the database of a record is missing; skip: leave the record out", only_with="eval_generate"
    )


@dataclass
class RunFlags:
    """Length of the training, and what it writes."""

    output_dir: str | None = option(None, "run folder; must be empty or new, unless resuming", metavar="DIR")
    batch_size: int = option(4, "records per micro-batch", names=("per_device_train_batch_size",), allowed=FROM_ONE)
    grad_accum: int = option(
        4, "micro-batches per optimizer step", names=("gradient_accumulation_steps",), allowed=FROM_ONE
    )
    learning_rate: float = option(2e-5, "peak learning rate", metavar="LR")
    num_epochs: float = option(3.0, "passes over the data", names=("num_train_epochs",), metavar="N")
    eval_steps: int | None = option(None, "evaluate every N steps (once an epoch)", names=("eval_accuracy_steps",))
    finetune_seed: int = option(42, "random seed", names=("seed",), allowed=SEED)
    track_flop: bool = option(False, "measure the FLOPs of the first 10 steps; print them beside the derived ones")
    same_flop: bool = option(False, "stop once the FLOPs of --regular for --num_epochs are spent")
    dry_run: bool = option(False, "print tokens, memory and FLOPs of a step, then stop")
    resume_from_checkpoint: str | None = option(None, "checkpoint folder, last, or auto (last if any)", metavar="DIR")
    allow_changes: bool = option(
        False,
        "resume with other data, order or objective; otherwise they must be those of the run",
        only_with="resume_from_checkpoint",
    )
    json: bool = option(False, "one JSON document on standard output at the end; lines go to standard error")
    debug: int = option(0, "0 warnings, 1 progress, 2 details")
    config: str | None = option(None, "YAML file of flags; the command line wins", metavar="FILE")


FLAGS = (TrainData, TrainedModel, AnswerFlags, RunFlags)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add our own flags, in groups."""
    parser.usage = "stepjepa train --train_file FILE --model_name NAME --output_dir DIR [flags below]"
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_training_data(parser, TrainedModel)
    add_options(parser, TrainData, "data")
    add_options(parser, AnswerFlags, "answers during training")
    add_options(parser, RunFlags, "run")
    add_options(parser, TrainingFlags, "of the published scripts (docs/published.md)")


def more_help() -> str:
    """Help on the flags of TrainingArguments that are not ours, for ``--help_all``."""
    ours = argparse.ArgumentParser(add_help=False)
    add_arguments(ours)
    inner = _training_parser()
    left_out = {*ours._option_string_actions, *(f"--{name}" for name in OURS)}
    for group in inner._action_groups:
        group._group_actions = [each for each in group._group_actions if not left_out & {*each.option_strings}]
    return "\ntransformers.TrainingArguments:\n" + inner.format_help().partition("options:")[2]


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse our own flags into ``args``, and the fields of TrainingArguments that were named into ``args.training``.

    ``args.given`` is the command line as it was given; in ``args.resolved`` the flags that ``--preset`` and
    ``--config`` stand for come before it.
    """
    given = list(arguments)
    first, _ = parser.parse_known_args(arguments)
    if first.config is not None:
        known = [*_training_parser()._actions, *parser._actions]
        flags = {
            option.removeprefix("--"): action.nargs in ("+", "*") or action.dest == "report_to"
            for action in known
            for option in action.option_strings
            if action.dest not in (*OURS, "config", "help", "help_all")
        }
        of_file, origins = arguments_of_file(first.config, flags)
        if isinstance(parser, Parser):
            # A flag of the command line wins, so an error about it is not the file's.
            named = {argument.partition("=")[0] for argument in given}
            parser.origins = {flag: place for flag, place in origins.items() if flag not in named}
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


# Fields of TrainingArguments that are refused as flags, since they have no effect with this trainer.
OURS = ("do_train", "do_eval", "do_predict", "remove_unused_columns", "label_names")


def _training_parser() -> Any:
    from transformers import HfArgumentParser, TrainingArguments

    return HfArgumentParser(TrainingArguments, add_help=False, allow_abbrev=False, argument_default=None)


def training_fields() -> list[str]:
    """The fields of ``transformers.TrainingArguments`` that are flags."""
    from dataclasses import fields

    from transformers import TrainingArguments

    return [field.name for field in fields(TrainingArguments) if field.init and field.name not in OURS]


def _parse_training(parser: argparse.ArgumentParser, rest: Sequence[str]) -> dict[str, Any]:
    inner = _training_parser()
    # Return only the flags that were named: the defaults of TrainingArguments must not overwrite ours.
    for action in inner._actions:
        action.default = argparse.SUPPRESS
        action.type = READERS.get(action.type, action.type)
        if action.dest == "report_to":
            # transformers' own parser takes only one name.
            action.nargs = "+"
    inner.prog = parser.prog
    inner.error = lambda message: Parser.error(parser, message)  # type: ignore[arg-type]  # same one-line form
    known, unknown = inner.parse_known_args(rest)
    fields = training_fields()
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
    """Check the flags as far as possible without reading data or a model, and return the objective's settings.

    Raises:
        UserError: flags contradict each other, have no effect, or have a wrong value.
    """
    config = jepa_config(args)
    refuse_without_effect(vars(args), *FLAGS)
    if sum(each is not None for each in (args.train_file, args.data_file, args.dataset)) != 1:
        raise UserError("name the data with one of --train_file, --data_file and --dataset")
    if args.data_file is not None and args.eval_file is not None:
        raise UserError("--data_file is split into both parts, so --eval_file can't stand beside it; leave one out")
    if args.no_cache and args.cache_dir is not None:
        raise UserError("--no_cache keeps nothing, and --cache_dir says where; leave one out")
    if args.plain and args.chat_template is not None:
        raise UserError("--chat_template does nothing with --plain, which has no chat format; leave one out")
    if args.eval_generate is not None and args.eval_file is None and args.data_file is None:
        raise UserError("--eval_generate needs held-out records; add --eval_file or --data_file")
    _check_model(args)
    if args.same_flop and args.training.get("max_steps", -1) > 0:
        raise UserError("--same_flop works out the number of steps, and --max_steps names it; leave one out")
    return config


def _check_model(args: argparse.Namespace) -> None:
    """Refuse flags of the model that contradict each other."""
    preset = args.model_name.startswith("preset:")
    if args.lora and (preset or args.pretrain):
        raise UserError(
            f"--lora adapts a trained model, and {'presets have' if preset else '--pretrain means'} random weights; "
            "leave one out"
        )
    if args.gguf_file is not None and (preset or args.pretrain or args.load_in_4bit or args.load_in_8bit):
        raise UserError("--gguf_file names trained weights, which are dequantised; leave it or what contradicts it out")
    if args.load_in_4bit and args.load_in_8bit:
        raise UserError("--load_in_4bit and --load_in_8bit exclude each other; leave one out")
    if args.train_tokenizer is not None and not (preset or args.pretrain):
        raise UserError("--train_tokenizer needs random weights, which --pretrain makes; add it or leave both out")


def run(args: argparse.Namespace) -> int:
    """Check what can be checked cheaply, then train."""
    config = check(args)
    from stepjepa.training.run import train

    try:
        with lines_to_stderr(args.json):
            record = train(args, config)
    except FinishedError as finished:
        # With ``auto``, a finished run is no error: a scheduler may start its job again.
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
    """Print the outcome of the run, its folder and the next command, or one JSON document."""
    from stepjepa.training.record import finished_json, last_lines, next_command

    if args.json:
        print_json(record if args.dry_run else finished_json(args, record))
        return
    if args.dry_run:
        return
    print_rows(last_lines(Path(args.output_dir), record))
    # On a line of its own, so that it can be copied from a terminal of any width.
    print(f"next: {shlex.join(next_command(args))}", flush=True)
