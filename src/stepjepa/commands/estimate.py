"""``stepjepa estimate``: estimate time and memory of a run on other devices, from the flags of ``train``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepjepa.commands import train
from stepjepa.errors import UserError
from stepjepa.options import FROM_ONE, Range, add_options, option
from stepjepa.terminal import lines_to_stderr

SUMMARY = "tokens, FLOPs, memory and time of a run, before there is a device for it"

DEVICES = {
    "a100": (312e12, 80e9),
    "h100": (989e12, 80e9),
    "h200": (989e12, 141e9),
    "b200": (2250e12, 180e9),
    "l40s": (362e12, 48e9),
    "mi300x": (1307e12, 192e9),
}
"""Device -> FLOP/s of dense bfloat16 matrix products and bytes of memory, from its data sheet."""

POSITIVE: Range = (lambda value: 0 < value < math.inf, "a number above 0")


@dataclass
class DeviceFlags:
    """The devices to estimate for, and the size of the data set."""

    gpus: int = option(1, "number of processes, one device each", allowed=FROM_ONE)
    device: str | None = option(
        None, "take peak and memory from its data sheet; peak in bfloat16", choices=sorted(DEVICES)
    )
    peak_tflops: float | None = option(
        None, "TFLOP/s of matrix products, instead of the data sheet's", metavar="T", allowed=POSITIVE
    )
    mfu: float = option(
        0.35,
        "share of the peak that training reaches",
        metavar="S",
        allowed=(lambda value: 0 < value <= 1, "a share above 0 and up to 1"),
    )
    memory_gib: float | None = option(
        None, "GiB of a device, instead of the data sheet's", metavar="G", allowed=POSITIVE
    )
    records: int | None = option(
        None, "the data set has N records, and --train_file is a sample of it", allowed=FROM_ONE
    )


COMMON = (
    *("train_file", "max_length", "model_name", "dtype", "lora", "regular", "step_jepa", "layout", "predictors"),
    *("jepa_loss_type", "jepa_ratio", "batch_size", "grad_accum", "num_epochs", "config"),
    *("gpus", "device", "peak_tflops", "mfu", "memory_gib", "records"),
)
"""Options that ``--help`` shows."""

more_help = train.more_help

EPILOG = """\
Takes all flags of 'stepjepa train', and first prints the same as its --dry_run.
The time is FLOPs / (processes x peak x MFU). MFU is the share of the peak that
training reaches; pass your own, since it depends on model, kernels and network.
Communication between processes is not included."""

# Flags of ``train`` that are refused here, with the reason.
REFUSED = {"dry_run": "is what this command does anyway", "resume_from_checkpoint": "has nothing to resume here"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``train`` and those of the devices."""
    train.add_arguments(parser)
    parser.usage = "stepjepa estimate --model_name NAME --train_file FILE --gpus N [flags below, and those of train]"
    parser.epilog = EPILOG
    # ``train`` requires this flag; nothing is written to the folder.
    parser.set_defaults(output_dir="estimate")
    add_options(parser, DeviceFlags, "devices")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse as ``train.parse`` does."""
    return train.parse(parser, arguments)


def run(args: argparse.Namespace) -> int:
    """Check the flags, then estimate."""
    config = train.check(args)
    check(args)
    from stepjepa.training.dry_run import GIB, dry_run
    from stepjepa.training.record import read_data

    with lines_to_stderr(args.json):
        records, eval_records, _ = read_data(args)
        found = dry_run(
            args,
            config,
            records,
            eval_records,
            processes=args.gpus,
            on_gpu=args.device is not None or args.peak_tflops is not None,
        )
        assert found is not None
        found["time"], found["device"] = _time(args, found), _memory(args, found)
        if found["time"] is not None:
            hours = found["time"]["run_seconds"] / 3600
            step = found["time"]["step_seconds"]
            print(f"time       {step:.3g} s a step, {hours:.3g} h in all, at an MFU of {args.mfu}")
        else:
            print("time       not estimated: name a --device, or its --peak_tflops")
        if found["device"] is not None:
            words = "fits" if found["device"]["fits"] else "does NOT fit"
            print(f"device     {found['device']['bytes'] / GIB:.1f} GiB: the memory above {words}")
    if args.json:
        print(json.dumps(found, indent=2))
    return 0


def _time(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, float] | None:
    """Seconds per step and per run, from FLOPs, peak and MFU; None if the peak or the FLOPs are unknown."""
    peak = args.peak_tflops * 1e12 if args.peak_tflops else DEVICES[args.device][0] if args.device else None
    if peak is None or found["flops"]["step"] is None:
        return None
    step = found["flops"]["step"] / (peak * args.mfu * found["processes"])
    return {"step_seconds": step, "run_seconds": step * found["steps"], "mfu": args.mfu, "peak": peak}


def _memory(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any] | None:
    """Memory of a device in bytes, and whether a process fits into it; None if the memory is unknown."""
    size = args.memory_gib * 2**30 if args.memory_gib else DEVICES[args.device][1] if args.device else None
    return None if size is None else {"bytes": size, "fits": found["memory"]["peak"] <= size}


def check(args: argparse.Namespace) -> None:
    """Refuse flags that have no effect here, contradict each other, or need another flag.

    Raises:
        UserError: such a flag is set.
    """
    for name, reason in REFUSED.items():
        if getattr(args, name):
            raise UserError(f"--{name} {reason}; leave it out")
    if args.records is not None and args.data_file is not None:
        raise UserError("--records says how many --train_file stands for; with --data_file leave it out")
