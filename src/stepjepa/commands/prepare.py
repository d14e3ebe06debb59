"""``stepjepa prepare``: make training files, from raw responses or on the spot."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from stepjepa.arguments import add_switch
from stepjepa.errors import UserError
from stepjepa.files import existing_file, read_jsonl, refuse_existing, write_jsonl
from stepjepa.step_preparation import RESPONSE_FIELD, SYSTEM_PROMPT, StepOptions, load_splitter, prepare_records
from stepjepa.tasks.stepmath import OPERATIONS, Difficulty, generate_split

SUMMARY = "make training files: steps from raw responses, or generated problems"


class Preparation(NamedTuple):
    """One kind of preparation, a sub-command of its own.

    Attributes:
        summary: one line of help.
        add_arguments: declares its flags.
        run: does it; returns the exit code.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def print_counts(rows: list[tuple[str, object]]) -> None:
    """A table of two columns on standard output: what, and how many."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value:>7}")


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    add_switch(parser.add_argument_group("output"), "--overwrite", help="replace files that are there already")


def _add_steps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_file", required=True, metavar="FILE", help="JSON lines with 'question' and a response")
    parser.add_argument("--output_file", required=True, metavar="FILE", help="JSON lines with 'messages'")
    parser.add_argument(
        "--response_field", default=RESPONSE_FIELD, metavar="NAME", help=f"field of the response ({RESPONSE_FIELD})"
    )
    parser.add_argument("--system_prompt", default=SYSTEM_PROMPT, metavar="TEXT", help=f"({SYSTEM_PROMPT})")
    parser.add_argument("--custom", metavar="MODULE:FUNCTION", help="your own splitter: response in, list of steps out")
    add_switch(
        parser.add_argument_group("filter"),
        "--require_correct",
        help="leave out records whose final answer is not the ground truth",
    )
    _add_overwrite(parser)


def _run_steps(args: argparse.Namespace) -> int:
    source = existing_file(args.input_file, "raw file")
    target = refuse_existing(args.output_file, args.overwrite)
    if target.exists() and target.samefile(source):
        raise UserError("is both input and output; name another --output_file", path=target)
    options = StepOptions(
        response_field=args.response_field,
        system_prompt=args.system_prompt,
        splitter=None if args.custom is None else load_splitter(args.custom),
        require_correct=args.require_correct,
    )
    records, counts = prepare_records(read_jsonl(source, "raw file"), options, source)
    if not records:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in counts.skipped.most_common())
        raise UserError(
            f"no record could be kept ({reasons or 'the file is empty'}); check --response_field and the file",
            path=source,
        )
    write_jsonl(target, records)
    print_counts(
        [
            ("read", counts.read),
            ("kept", counts.kept),
            ("skipped", counts.skipped.total()),
            *((f"  {reason}", count) for reason, count in counts.skipped.most_common()),
            ("steps per record", f"{counts.steps / counts.kept:.2f}"),
        ]
    )
    print(f"written to {target}")
    return 0


def _add_stepmath_arguments(parser: argparse.ArgumentParser) -> None:
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
    _add_overwrite(parser)


def _run_stepmath(args: argparse.Namespace) -> int:
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file where a folder is needed; name another --output_dir", path=folder)
    for name in ("train_size", "test_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}: expected 1 or more, got {getattr(args, name)}")
    targets = [refuse_existing(folder / f"{part}.jsonl", args.overwrite) for part in ("train", "test")]
    settings: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(Difficulty)}
    settings["operations"] = tuple(settings["operations"])
    try:
        parts = generate_split(args.train_size, args.test_size, args.seed, Difficulty(**settings))
    except ValueError as error:
        raise UserError(f"--{error}") from error
    for target, records in zip(targets, parts, strict=True):
        write_jsonl(target, records)
    steps = [record["total_steps"] for records in parts for record in records]
    print_counts(
        [
            *((f"written to {target}", len(records)) for target, records in zip(targets, parts, strict=True)),
            ("steps per record", f"{sum(steps) / len(steps):.2f}"),
        ]
    )
    return 0


PREPARATIONS = {
    "steps": Preparation(
        "training records with marked steps, from the responses of a reasoning model", _add_steps_arguments, _run_steps
    ),
    "stepmath": Preparation(
        "generated word problems, train and test, each step in need of the one before",
        _add_stepmath_arguments,
        _run_stepmath,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A sub-command for each of :data:`PREPARATIONS`."""
    kinds = parser.add_subparsers(dest="preparation", required=True, metavar="KIND", title="kinds")
    for name, preparation in PREPARATIONS.items():
        inner = kinds.add_parser(name, help=preparation.summary, description=preparation.summary, allow_abbrev=False)
        preparation.add_arguments(inner)


def run(args: argparse.Namespace) -> int:
    """Run the preparation that was chosen.

    Raises:
        UserError: an input is missing or wrong, an output is there already, or a setting is out of range.
    """
    return PREPARATIONS[args.preparation].run(args)
