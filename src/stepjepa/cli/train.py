"""``stepjepa train`` and ``stepjepa estimate``. Other flags are fields of ``transformers.TrainingArguments``."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepjepa.base.arguments import expanded
from stepjepa.base.json_object import JsonObject
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import log_to_stderr, note
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import add_run, arguments_of_file, more_help, run_config, trainer_values
from stepjepa.cli.parser import Parser
from stepjepa.cli.published import CommandLine, translate_train
from stepjepa.config.devices import DEVICES
from stepjepa.config.option import FROM_ONE, POSITIVE, SHARE, check_effects, option
from stepjepa.config.run import RunConfig
from stepjepa.config.trainer import NEEDLESS


@dataclass
class LaunchFlags:
    """Settings of one launch, which are not part of the run's description: output, file of flags."""

    dry_run: bool = option(False, "print tokens, memory and FLOPs of a step, then stop")
    json: bool = option(False, "one JSON document on standard output at the end; lines go to standard error")
    debug: int = option(0, "0 warnings, 1 progress, 2 details")
    config: str | None = option(None, "YAML file of flags; the command line wins", metavar="FILE", path=True)
    trust_folder: bool = option(False, "with the `config` of a run folder: run code that it names", only_with="config")
    preset: Literal["paper"] | None = option(
        None, "use the defaults of the published programs: labels, predictors, length; named flags win"
    )


def add_flags(parser: Parser) -> None:
    """Add the flags of a run."""
    add_run(parser)
    parser.required += ["train_file", "model_name", "output_dir"]
    parser.more_help = more_help
    never = "a run folder is never overwritten; name another --output_dir, or resume with --resume_from_checkpoint last"
    parser.not_flags = {f"--{name}": never for name in ("overwrite", "overwrite_output_dir", "force")}
    parser.not_flags |= {f"--{name}": f"{remedy}, see --{ours}" for name, (remedy, ours) in NEEDLESS.items()}
    parser.not_flags |= {
        "--warmup": "did you mean --warmup_steps (of the learning rate), or --lbd_warmup?",
        "--test_file": "'stepjepa evaluate --test_file FILE' scores answers of the trained model; records for losses "
        "while it trains are --eval_file FILE",
    }


def parse(parser: Parser, typed: Sequence[str]) -> argparse.Namespace:
    """Parse flags of a run, those of ``TrainingArguments`` among them, into ``args.run``, its ``RunConfig``.

    ``args.typed`` is the command line as it was typed. Settings in the file of ``--config`` come before it.
    """
    arguments, line = list(typed), CommandLine.of(typed)
    if (file := line.value("config")) is not None:
        arguments = [*arguments_of_file(parser, expanded(file), typed, trusted=line.is_on("trust_folder")), *arguments]
    arguments, notes = translate_train(arguments, RunConfig.eval_split)
    for message in notes:
        note(message)
    args: argparse.Namespace
    args, others = parser.parse_known_args(arguments)
    args.typed, args.trainer = list(typed), trainer_values(parser, others)
    parser.check_required(args, "model_name", "output_dir")
    check_effects(vars(args), LaunchFlags)
    args.run = run_config(args)
    args.run.check_required()
    return args


def train(args: argparse.Namespace) -> JsonObject | int:
    """Train, and print the outcome of the run, its folder and the next command; with ``dry_run`` print an estimate."""
    from stepjepa.running.finished import finished_json, print_finished
    from stepjepa.running.run import run

    config: RunConfig = args.run
    log_to_stderr((logging.WARNING, logging.INFO, logging.DEBUG)[min(max(args.debug, 0), 2)])
    if args.dry_run:
        from stepjepa.running.data import read_data
        from stepjepa.running.estimate import dry_run

        records, held_out, _ = read_data(config)
        estimated = dry_run(config, records, held_out)
        return 0 if estimated is None else dict(estimated)
    record = run(config, command=["train", *args.typed]).record
    if not is_main_process():
        return 0
    if not args.json:
        print_finished(config, record)
    return finished_json(config, record)


TRAIN = Command(
    train,
    add=add_flags,
    flags=((LaunchFlags, "run"),),
    parse=parse,
    several=True,
    common="train_file columns eval_file max_length model_name dtype lora regular step_jepa layout predictors lbd "
    "jepa_loss_type jepa_ratio eval_generate output_dir batch_size grad_accum learning_rate num_epochs "
    "eval_steps finetune_seed resume_from_checkpoint dry_run config",
    epilog="""\
example: stepjepa train --train_file train.jsonl --model_name preset:tiny \\
  --step_jepa --jepa_loss_type infonce --output_dir runs/a
All fields of transformers.TrainingArguments are flags too, such as --bf16.""",
)


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
    """Add the flags of ``train``; its required output folder, to which nothing is written here, has a default."""
    add_flags(parser)
    parser.set_defaults(output_dir="estimate")
    parser.required.remove("output_dir")


def estimate(args: argparse.Namespace) -> JsonObject:
    """Print the estimate of ``train --dry_run``, and the time and memory on another device."""
    from stepjepa.running.data import read_data
    from stepjepa.running.estimate import dry_run
    from stepjepa.running.estimate_text import GIB, on_device

    device = DEVICES.get(args.device)
    peak = args.peak_tflops * 1e12 if args.peak_tflops else device and device.peak
    memory = args.memory_gib * GIB if args.memory_gib else device and device.memory
    records, held_out, _ = read_data(args.run)
    estimated = dry_run(
        args.run, records, held_out, processes=args.gpus, on_gpu=peak is not None, all_records=args.records
    )
    if estimated is None:
        # The first process prints it.
        return {}
    on_device(estimated, peak, args.mfu, memory)
    return dict(estimated)


ESTIMATE = Command(
    estimate,
    add=add_estimate_flags,
    flags=((LaunchFlags, "run"), (DeviceFlags, "devices")),
    parse=parse,
    several=True,
    common="train_file max_length model_name dtype lora regular step_jepa layout predictors jepa_loss_type "
    "jepa_ratio batch_size grad_accum num_epochs config gpus device peak_tflops mfu memory_gib records",
    epilog="""\
Takes all flags of 'stepjepa train', and first prints the same as its --dry_run.
The time is FLOPs / (processes x peak x MFU), without communication.""",
)
