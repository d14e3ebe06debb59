"""``stepjepa train`` and ``stepjepa estimate``. Flags that are not ours go to ``transformers.TrainingArguments``."""

import argparse
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepjepa.base.json_object import JsonObject
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import print_rows
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import add_run, arguments_of_file, more_help, note, run_config, trainer_values
from stepjepa.cli.parser import Parser
from stepjepa.cli.published import CommandLine, translate_train
from stepjepa.config.option import FROM_ONE, POSITIVE, SHARE, option
from stepjepa.config.run import RunConfig


@dataclass
class LaunchFlags:
    """What one start of a run prints and where its flags are; none of it describes the run."""

    dry_run: bool = option(False, "print tokens, memory and FLOPs of a step, then stop")
    json: bool = option(False, "one JSON document on standard output at the end; lines go to standard error")
    debug: int = option(0, "0 warnings, 1 progress, 2 details")
    config: str | None = option(None, "YAML file of flags; the command line wins", metavar="FILE")
    preset: Literal["paper"] | None = option(
        None, "defaults of the published programs instead of ours: labels, predictors, length; named flags win"
    )


def add_flags(parser: Parser) -> None:
    """Add the flags of a run."""
    add_run(parser)
    parser.required += ["train_file", "model_name", "output_dir"]
    parser.more_help = more_help


def parse(parser: Parser, given: Sequence[str]) -> argparse.Namespace:
    """Parse flags of a run, those of ``TrainingArguments`` among them, into ``args.run``, its ``RunConfig``.

    ``args.given`` is the command line as it was given. Settings in the file of ``--config`` come before it.
    """
    args = parse_run(parser, given)
    parser.refuse_missing(args, "model_name", "output_dir")
    args.run = run_config(args)
    args.run.refuse_missing()
    return args


def parse_run(parser: Parser, given: Sequence[str]) -> argparse.Namespace:
    """Parse flags of a run, with those of ``TrainingArguments`` in ``args.trainer``."""
    arguments = list(given)
    if (file := CommandLine.of(arguments).value("config")) is not None:
        arguments = [*arguments_of_file(parser, file, given), *arguments]
    arguments, notes = translate_train(arguments, RunConfig.eval_split)
    for each in notes:
        note(each)
    args, rest = parser.parse_known_args(arguments)
    args.given, args.trainer = list(given), trainer_values(parser, rest)
    return args


def train(args: argparse.Namespace) -> JsonObject | int:
    """Train, and print the outcome of the run, its folder and the next command."""
    from stepjepa.running.data import read_data
    from stepjepa.running.estimate import dry_run
    from stepjepa.running.run import run
    from stepjepa.running.screen import finished_json, last_lines, next_command

    config: RunConfig = args.run
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(max(args.debug, 0), 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if args.dry_run:
        records, held_out, _ = read_data(config)
        return dry_run(config, records, held_out) or 0
    record = run(config, command=["train", *args.given]).record
    if not is_main_process():
        return 0
    if not args.json and record.results is not None:
        print_rows(last_lines(Path(str(config.output_dir)), record.results))
        # On a line of its own, so that it can be copied from a terminal of any width.
        print(f"next: {shlex.join(next_command(config))}", flush=True)
    return finished_json(config, record)


TRAIN = Command(
    train,
    add=add_flags,
    flags=((LaunchFlags, "run"),),
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
    records: int | None = option(None, "the data set has N records; `train_file` is a sample of it", allowed=FROM_ONE)


def add_estimate_flags(parser: Parser) -> None:
    """Add the flags of ``train``, of which no output folder is required, since nothing is written to it."""
    add_flags(parser)
    parser.required.remove("output_dir")


def parse_estimate(parser: Parser, given: Sequence[str]) -> argparse.Namespace:
    """Parse as :func:`parse` does."""
    args = parse_run(parser, given)
    parser.refuse_missing(args, "model_name")
    args.output_dir = getattr(args, "output_dir", "estimate")
    args.run = run_config(args)
    args.run.refuse_missing()
    return args


def estimate(args: argparse.Namespace) -> JsonObject:
    """Print what ``train --dry_run`` does, and time and memory on other devices."""
    from stepjepa.running.data import read_data
    from stepjepa.running.estimate import GIB, dry_run

    peak, memory = DEVICES.get(args.device, (None, None))
    peak = args.peak_tflops * 1e12 if args.peak_tflops else peak
    memory = args.memory_gib * GIB if args.memory_gib else memory
    records, held_out, _ = read_data(args.run)
    found = dry_run(args.run, records, held_out, processes=args.gpus, on_gpu=peak is not None, all_records=args.records)
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
    flags=((LaunchFlags, "run"), (DeviceFlags, "devices")),
    parse=parse_estimate,
    common="train_file max_length model_name dtype lora regular step_jepa layout predictors jepa_loss_type "
    "jepa_ratio batch_size grad_accum num_epochs config gpus device peak_tflops mfu memory_gib records",
    epilog="""\
Takes all flags of 'stepjepa train', and first prints the same as its --dry_run.
The time is FLOPs / (processes x peak x MFU), without communication.""",
)
