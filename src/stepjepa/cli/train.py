"""``stepjepa train`` and ``stepjepa estimate``. Flags that are not ours go to ``transformers.TrainingArguments``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from stepjepa.base.errors import UserError
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import print_rows
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import (
    ModelFlags,
    add_training_data,
    arguments_of_file,
    jepa_config,
    more_help,
    named_fields,
    note,
)
from stepjepa.cli.published import CommandLine, translate_train
from stepjepa.config.jepa import Dtype, JepaConfig
from stepjepa.config.option import (
    BELOW_ONE,
    FROM_ONE,
    FROM_ZERO,
    POSITIVE,
    SHARE,
    Parser,
    option,
    refuse_both,
    refuse_without_effect,
)
from stepjepa.store.record import RunRecord, read_record
from stepjepa.store.resume import FinishedError


@dataclass
class TrainData:
    """How records are read, and which are held out."""

    cache_dir: str | None = option(None, "folder for prepared data (~/.cache/stepjepa)", metavar="DIR")
    no_cache: bool = option(False, "do not use the cache of prepared data")
    eval_file: str | None = option(None, "held-out records, for losses during training", metavar="FILE")
    data_file: str | None = option(None, "one file to split, instead of --train_file, --eval_file", metavar="FILE")
    dataset: list[str] | None = option(None, "files, folders or hub data sets NAME:SUBSET:SPLIT, mixed", metavar="NAME")
    dataset_weights: list[float] | None = option(
        None, "relative size of each data set; no record is repeated (all records)", metavar="W", only_with="dataset"
    )
    eval_split: float = option(0.2, "share of --data_file held out", allowed=SHARE, only_with="data_file")
    split_seed: int = option(42, "seed of the split, or of the mixture", only_with="data_file or dataset_weights")


_lora = partial(option, only_with="lora")


@dataclass
class TrainedModel(ModelFlags):
    """Which model, and which of its weights are trained."""

    dtype: Dtype = option("float32", "dtype of the weights")
    pretrain: bool = option(False, "start from random weights; with configuration and tokenizer of --model_name")
    attn_implementation: str | None = option(None, "as in transformers: sdpa, eager ...", metavar="NAME")
    lora: bool = option(False, "train an adapter and the predictor rows; instead of all weights")
    lora_rank: int = _lora(16, "rank of the adapter", metavar="R", allowed=FROM_ONE)
    lora_alpha: int | None = _lora(None, "scale of the adapter (twice the rank)", metavar="A", allowed=FROM_ONE)
    lora_dropout: float = _lora(0.0, "dropout on the adapter's input", metavar="P", allowed=BELOW_ONE)
    lora_targets: str = _lora("all-linear", "layers that get an adapter; q_proj,v_proj ...", metavar="NAMES")
    use_dora: bool = _lora(False, "DoRA instead of LoRA")
    use_rslora: bool = _lora(False, "rsLoRA: scale by the root of the rank")
    load_in_4bit: bool = _lora(False, "frozen weights in 4 bits, through bitsandbytes (QLoRA)")
    load_in_8bit: bool = _lora(False, "frozen weights in 8 bits, through bitsandbytes")


_held_out = partial(option, only_with="eval_file or data_file")
_answers = partial(option, only_with="eval_generate")


@dataclass
class AnswerFlags:
    """Answers to held-out records during training."""

    eval_generate: int | None = _held_out(
        None, "answer and score N held-out records at every evaluation", names=("max_eval_samples",), allowed=FROM_ONE
    )
    eval_task: str = _answers("auto", "as --task of 'stepjepa evaluate'", metavar="NAME")
    eval_max_new_tokens: int = _answers(256, "tokens an answer", names=("max_new_tokens_eval",), allowed=FROM_ONE)
    spider_path: str | None = _answers(None, "folder of Spider's databases", metavar="DIR")
    missing_databases: Literal["error", "skip"] = _answers("error", "record without database; skip: leave it out")


@dataclass
class RunFlags:
    """Length of the training, and what it writes."""

    output_dir: str | None = option(None, "run folder; must be empty or new, unless resuming", metavar="DIR")
    batch_size: int = option(4, "records per micro-batch", names=("per_device_train_batch_size",), allowed=FROM_ONE)
    grad_accum: int = option(4, "micro-batches a step", names=("gradient_accumulation_steps",), allowed=FROM_ONE)
    learning_rate: float = option(2e-5, "peak learning rate", metavar="LR", allowed=FROM_ZERO)
    num_epochs: float = option(3.0, "passes over the data", names=("num_train_epochs",), metavar="N", allowed=POSITIVE)
    eval_steps: int | None = _held_out(
        None, "evaluate every N steps (once an epoch)", names=("eval_accuracy_steps",), allowed=FROM_ONE
    )
    finetune_seed: int = option(42, "seed", names=("seed",), allowed=(lambda seed: 0 <= seed < 2**32, "0 to 2**32 - 1"))
    track_flop: bool = option(False, "measure the FLOPs of the first 10 steps; print them beside the derived ones")
    same_flop: bool = option(False, "stop once the FLOPs of --regular for --num_epochs are spent")
    dry_run: bool = option(False, "print tokens, memory and FLOPs of a step, then stop")
    resume_from_checkpoint: str | None = option(None, "checkpoint folder, last, or auto (last if any)", metavar="DIR")
    allow_changes: bool = option(
        False, "resume although data, order or objective have changed", only_with="resume_from_checkpoint"
    )
    json: bool = option(False, "one JSON document on standard output at the end; lines go to standard error")
    debug: int = option(0, "0 warnings, 1 progress, 2 details")
    config: str | None = option(None, "YAML file of flags; the command line wins", metavar="FILE")


@dataclass
class PresetFlag:
    """A set of defaults; ``published.translate_train`` writes it out before flags are parsed."""

    preset: Literal["paper"] | None = option(
        None, "defaults of the published programs instead of ours: labels, predictors, length; named flags win"
    )


def add_flags(parser: Parser) -> None:
    """Add our own flags."""
    add_training_data(parser, TrainedModel)
    parser.add(TrainData, "data")
    parser.add(AnswerFlags, "answers during training")
    parser.add(RunFlags, "run")
    parser.add(PresetFlag, "run")
    parser.required += ["train_file", "model_name", "output_dir"]
    parser.more_help = more_help


def parse(parser: Parser, given: Sequence[str]) -> argparse.Namespace:
    """Parse our own flags into ``args``, those of TrainingArguments into ``args.training``, and check them all.

    ``args.given`` is the command line as it was given; in ``args.resolved`` the flags that ``--preset`` and
    ``--config`` stand for come before it. ``args.jepa`` is the objective.
    """
    arguments = list(given)
    if (file := CommandLine.of(arguments).value("config")) is not None:
        arguments = [*arguments_of_file(parser, file, given), *arguments]
    arguments, notes = translate_train(arguments, TrainData.eval_split)
    for each in notes:
        note(each)
    args, rest = parser.parse_known_args(arguments)
    args.given, args.resolved, args.training = list(given), arguments, named_fields(parser, rest)
    parser.refuse_missing(args, "model_name", "output_dir")
    args.jepa = check(args)
    return args


def check(args: argparse.Namespace) -> JepaConfig:
    """Refuse flags that contradict each other or have no effect, and return the objective's settings."""
    config = jepa_config(args)
    refuse_without_effect(vars(args), TrainData, TrainedModel, AnswerFlags, RunFlags)
    if [args.train_file, args.data_file, args.dataset].count(None) != 2:
        raise UserError("name the data with one of --train_file, --data_file and --dataset")
    refuse_both(args, ("data_file", "eval_file"), ("no_cache", "cache_dir"), ("plain", "chat_template"))
    refuse_both(args, ("load_in_4bit", "load_in_8bit"))
    if args.lora and (args.pretrain or args.model_name.startswith("preset:")):
        raise UserError("--lora needs trained weights, and presets have random weights, as with --pretrain")
    if args.same_flop and args.training.get("max_steps", -1) > 0:
        raise UserError("--same_flop works out the number of steps, and --max_steps names it; leave one out")
    return config


def train(args: argparse.Namespace) -> Any:
    """Train, and print the outcome of the run, its folder and the next command."""
    from stepjepa.running.run import train
    from stepjepa.running.screen import finished_json, last_lines, next_command

    try:
        record = train(args, args.jepa)
    except FinishedError as finished:
        # With ``auto``, a finished run is no error: a scheduler may start its job again.
        if str(args.resume_from_checkpoint).lower() != "auto":
            raise
        if not is_main_process():
            return 0
        print(finished, file=sys.stderr)
        return finished_json(args, read_record(args.output_dir))
    if record is None or not is_main_process():
        return 0
    if not isinstance(record, RunRecord):
        return record
    if not args.json and record.results is not None:
        print_rows(last_lines(Path(args.output_dir), record.results))
        # On a line of its own, so that it can be copied from a terminal of any width.
        print(f"next: {shlex.join(next_command(args))}", flush=True)
    return finished_json(args, record)


TRAIN = Command(
    train,
    add=add_flags,
    parse=parse,
    common="train_file eval_file max_length model_name dtype lora regular step_jepa layout predictors lbd "
    "jepa_loss_type jepa_ratio eval_generate output_dir batch_size grad_accum learning_rate num_epochs "
    "eval_steps finetune_seed resume_from_checkpoint dry_run config",
    epilog="""\
example: stepjepa train --train_file train.jsonl --model_name preset:tiny \\
  --step_jepa --jepa_loss_type infonce --output_dir runs/a
All fields of transformers.TrainingArguments are flags too, such as --bf16.""",
)

DEVICES = {
    "a100": (312e12, 80e9),
    "h100": (989e12, 80e9),
    "h200": (989e12, 141e9),
    "b200": (2250e12, 180e9),
    "l40s": (362e12, 48e9),
    "mi300x": (1307e12, 192e9),
}
"""Device -> FLOP/s of dense bfloat16 matrix products and bytes of memory, from its data sheet."""


@dataclass
class DeviceFlags:
    """The devices to estimate for, and the size of the data set."""

    gpus: int = option(1, "number of processes, one device each", allowed=FROM_ONE)
    device: str | None = option(None, "take bfloat16 peak and memory from its data sheet", choices=(*sorted(DEVICES),))
    peak_tflops: float | None = option(None, "TFLOP/s, instead of the data sheet's", metavar="T", allowed=POSITIVE)
    mfu: float = option(0.35, "share of the peak that training reaches", metavar="S", allowed=SHARE)
    memory_gib: float | None = option(None, "GiB, instead of the data sheet's", metavar="G", allowed=POSITIVE)
    records: int | None = option(None, "the data set has N records; --train_file is a sample of it", allowed=FROM_ONE)


def add_estimate_flags(parser: Parser) -> None:
    """Add the flags of ``train``; its required output folder, to which nothing is written here, has a default."""
    add_flags(parser)
    parser.set_defaults(output_dir="estimate")
    parser.required.remove("output_dir")


def estimate(args: argparse.Namespace) -> dict[str, Any]:
    """Print what ``train --dry_run`` does, and time and memory on other devices."""
    from stepjepa.running.estimate import GIB, dry_run
    from stepjepa.running.screen import read_data

    peak, memory = DEVICES.get(args.device, (None, None))
    peak = args.peak_tflops * 1e12 if args.peak_tflops else peak
    memory = args.memory_gib * GIB if args.memory_gib else memory
    records, eval_records, _ = read_data(args)
    found = dry_run(args, args.jepa, records, eval_records, processes=args.gpus, on_gpu=peak is not None)
    if found is None:
        # Another process of several prints it.
        return {}
    flops, found["time"], found["device"] = found["flops"]["step"], None, None
    if peak is None or flops is None:
        print("time: not estimated; name a --device, or its --peak_tflops")
    else:
        step = flops / (peak * args.mfu * found["processes"])
        run = step * found["steps"]
        found["time"] = {"step_seconds": step, "run_seconds": run, "mfu": args.mfu, "peak": peak}
        print(f"time: {step:.3g} s a step, {run / 3600:.3g} h in all, at an MFU of {args.mfu}")
    if memory is not None:
        fits = found["memory"]["peak"] <= memory
        found["device"] = {"bytes": memory, "fits": fits}
        print(f"device: {memory / GIB:.1f} GiB: the memory above {'fits' if fits else 'does NOT fit'}")
    return found


ESTIMATE = Command(
    estimate,
    add=add_estimate_flags,
    flags=((DeviceFlags, "devices"),),
    parse=parse,
    common="train_file max_length model_name dtype lora regular step_jepa layout predictors jepa_loss_type "
    "jepa_ratio batch_size grad_accum num_epochs config gpus device peak_tflops mfu memory_gib records",
    epilog="""\
Takes all flags of 'stepjepa train', and first prints the same as its --dry_run.
The time is FLOPs / (processes x peak x MFU), without communication.""",
)
