"""``stepjepa prepare stepmath``: generated word problems, each step in need of the one before."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from stepjepa.commands.preparation import Preparation, add_overwrite, check_target, print_counts, write_files
from stepjepa.errors import UserError
from stepjepa.tasks.stepmath import OPERATIONS, Difficulty, generate_split


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Difficulty()
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="gets train.jsonl and test.jsonl")
    parser.add_argument("--train_size", type=int, default=8000, metavar="N", help="(8000)")
    parser.add_argument("--test_size", type=int, default=500, metavar="N", help="(500)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same files (0)")
    group = parser.add_argument_group("difficulty")
    helps = {
        "min_steps": "fewest steps of a problem",
        "max_steps": "most steps of a problem",
        "max_quantity": "largest number by which an amount changes",
        "max_amount": "largest amount, also as a result",
    }
    for name, text in helps.items():
        value = getattr(default, name)
        group.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{text} ({value})")
    group.add_argument(
        "--operations", nargs="+", default=list(OPERATIONS), metavar="NAME", help=f"some of {', '.join(OPERATIONS)}"
    )
    add_overwrite(parser)


def _run(args: argparse.Namespace) -> int:
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file where a folder is needed; name another --output_dir", path=folder)
    for name in ("train_size", "test_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}: expected 1 or more, got {getattr(args, name)}")
    targets = [check_target(str(folder / f"{part}.jsonl"), args.overwrite) for part in ("train", "test")]
    settings: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(Difficulty)}
    settings["operations"] = tuple(settings["operations"])
    try:
        parts = generate_split(args.train_size, args.test_size, args.seed, Difficulty(**settings))
    except ValueError as error:
        raise UserError(f"--{error}") from error
    write_files(targets, parts)
    steps = [record["total_steps"] for records in parts for record in records]
    print_counts(
        [
            *((f"written to {target}", len(records)) for target, records in zip(targets, parts, strict=True)),
            ("steps per record", f"{sum(steps) / len(steps):.2f}"),
        ]
    )
    return 0


STEPMATH = Preparation(
    "generated word problems, train and test, each step in need of the one before", _add_arguments, _run
)
