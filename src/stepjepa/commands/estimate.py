"""``stepjepa estimate``: what a run would take on other devices than are here. Flags of ``train``, and the cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from stepjepa.commands import train
from stepjepa.compute.devices import DEVICES
from stepjepa.errors import UserError

SUMMARY = "tokens, FLOPs, memory, communication and time of a run, before there is a device for it"

EPILOG = """\
All flags of 'stepjepa train' are taken, --config, --fsdp, --deepspeed and the other fields of TrainingArguments among
them (stepjepa train --help). No weights are read or made. Times come from rates that were measured (--measure,
--rates) or given (--device or --peak_tflops, with --mfu); without them everything else is still told."""

# What an estimate is, and what would make it something else.
REFUSED = {"dry_run": "is what this command does anyway", "resume_from_checkpoint": "has nothing to resume here"}

GIVEN = ("device", "peak_tflops", "mfu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``train``, and our own."""
    train.add_arguments(parser)
    parser.usage = "stepjepa estimate --model_name NAME --train_file FILE --gpus N [flags below, and those of train]"
    parser.epilog = EPILOG
    # Nothing is written there.
    parser.set_defaults(output_dir="estimate")
    group = parser.add_argument_group("cluster")
    add = group.add_argument
    add("--gpus", type=int, default=1, metavar="N", help="processes, each with a device of its own (1)")
    add("--device", choices=sorted(DEVICES), help="the vendor's figures: peak in bfloat16, memory, link")
    add("--peak_tflops", type=float, metavar="T", help="TFLOP/s of matrix products, instead of a vendor's peak")
    add("--mfu", type=float, metavar="S", help="share of that peak that training reaches: an assumption of yours")
    add("--memory_gib", type=float, metavar="G", help="GiB of a device")
    add("--interconnect", type=float, metavar="GB/S", help="GB/s that each process can send to the others")
    add("--rates", metavar="FILE", help="rates that --measure wrote")
    add("--measure", metavar="FILE", help="measure the rates of this machine (half a minute) and write them")
    add("--records", type=int, metavar="N", help="the data set has N records, and --train_file is a sample of it")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """As ``train`` does."""
    return train.parse(parser, arguments)


def run(args: argparse.Namespace) -> int:
    """Check the flags, then estimate."""
    config = train.check(args)
    check(args)
    from stepjepa.training.cluster_estimate import print_estimate

    print_estimate(args, config)
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse flags of the cluster that contradict each other or do nothing.

    Raises:
        UserError: naming them.
    """
    _check_numbers(args)
    for name, reason in REFUSED.items():
        if getattr(args, name):
            raise UserError(f"--{name} {reason}; leave it out")
    if args.records is not None and args.data_file is not None:
        raise UserError("--records says how many --train_file stands for; with --data_file leave it out")
    if args.records is None and args.streaming:
        raise UserError("--streaming reads the beginning of the file alone; add --records N, how many it has")
    measured = [f"--{name}" for name in ("rates", "measure") if getattr(args, name) is not None]
    if len(measured) > 1:
        raise UserError("--measure writes the file that --rates reads; leave one out")
    given = [f"--{name}" for name in GIVEN if getattr(args, name) is not None]
    if measured and given:
        raise UserError(f"{measured[0]} says how fast the device is, and so does {given[0]}; leave one out")
    if args.mfu is not None and args.device is None and args.peak_tflops is None:
        raise UserError("--mfu is a share of a peak; add --device or --peak_tflops")
    if args.interconnect is not None and args.gpus == 1:
        raise UserError("--interconnect does nothing with one process; add --gpus or leave it out")


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("gpus", "records"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name}: expected 1 or more, got {value}")
    for name in ("peak_tflops", "memory_gib", "interconnect"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name}: expected a positive number, got {value}")
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise UserError(f"--mfu: expected a share above 0 and up to 1, got {args.mfu}")
