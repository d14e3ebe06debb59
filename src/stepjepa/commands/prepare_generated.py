"""``stepjepa prepare stepmath`` and ``nl-rx``: records that are generated, or read from NL-RX's own pair of files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from stepjepa.commands.preparation import (
    Job,
    Preparation,
    add_overwrite,
    print_counts,
    write_files,
    write_records,
)
from stepjepa.errors import UserError
from stepjepa.files import existing_file, read_text, refuse_existing
from stepjepa.preparing.conversion import convert_rows
from stepjepa.tasks import nl_rx_grammar, stepmath
from stepjepa.tasks.nl_rx import make_record

Parts = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def _check_sizes(args: argparse.Namespace, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name}: expected 1 or more, got {value}")


def _write_generated(targets: Sequence[Path], generate: Callable[[], Parts], more: bool = False) -> int:
    """Generate training and test records, and write as many of the two as there are files."""
    try:
        parts = generate()[: len(targets)]
    except ValueError as error:
        raise UserError(f"--{error}") from error
    write_files(targets, parts)
    rows: list[tuple[str, object]] = [
        (f"written to {target}", len(records)) for target, records in zip(targets, parts, strict=True)
    ]
    if more:
        steps = [record["total_steps"] for records in parts for record in records]
        rows.append(("steps per record", f"{sum(steps) / len(steps):.2f}"))
    print_counts(rows)
    return 0


def _add_stepmath_arguments(parser: argparse.ArgumentParser) -> None:
    default = stepmath.Difficulty()
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
    known = stepmath.OPERATIONS
    group.add_argument("--operations", nargs="+", default=known, metavar="NAME", help=f"some of {', '.join(known)}")
    add_overwrite(parser.add_argument_group("output"))


def _run_stepmath(args: argparse.Namespace) -> int:
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file where a folder is needed; name another --output_dir", path=folder)
    _check_sizes(args, ("train_size", "test_size"))
    targets = [refuse_existing(str(folder / f"{part}.jsonl"), args.overwrite) for part in ("train", "test")]
    settings = {field.name: getattr(args, field.name) for field in fields(stepmath.Difficulty)}
    settings["operations"] = tuple(settings["operations"])

    def generate() -> Parts:
        return stepmath.generate_split(args.train_size, args.test_size, args.seed, stepmath.Difficulty(**settings))

    return _write_generated(targets, generate, more=True)


STEPMATH = Preparation(
    "generated word problems, train and test, each step in need of the one before",
    _add_stepmath_arguments,
    _run_stepmath,
)

_SIZE, _SEED = 10_000, 0


def _add_nl_rx_arguments(parser: argparse.ArgumentParser) -> None:
    generated = parser.add_argument_group("generated from the grammar")
    generated.add_argument("--size", type=int, metavar="N", help=f"records ({_SIZE})")
    generated.add_argument("--seed", type=int, metavar="N", help=f"the same seed gives the same files ({_SEED})")
    generated.add_argument("--test_size", type=int, metavar="N", help="further records to test with; needs --test_file")
    generated.add_argument("--test_file", metavar="FILE", help="where those go")
    published = parser.add_argument_group("from the published pair of files instead, line by line")
    published.add_argument("--source_file", metavar="FILE", help="sentences (NL-RX-Synth.src.txt)")
    published.add_argument("--target_file", metavar="FILE", help="their regular expressions (NL-RX-Synth.targ.txt)")
    parser.add_argument("--output_file", required=True, metavar="FILE", help="JSON lines with 'messages'")
    add_overwrite(parser.add_argument_group("output"))


def _run_nl_rx(args: argparse.Namespace) -> int:
    of_generated, of_published = (
        [name for name in names if getattr(args, name) is not None]
        for names in (("size", "seed", "test_size", "test_file"), ("source_file", "target_file"))
    )
    if of_generated and of_published:
        told = f"--{of_generated[0]} is for generated records, --{of_published[0]} for published ones; leave one out"
        raise UserError(told)
    if of_published:
        return _convert_nl_rx(args)
    if (args.test_size is None) != (args.test_file is None):
        raise UserError("give both --test_size and --test_file, or neither")
    _check_sizes(args, ("size", "test_size"))
    names = [args.output_file] if args.test_file is None else [args.output_file, args.test_file]
    targets = [refuse_existing(name, args.overwrite) for name in names]
    if len({target.resolve() for target in targets}) < len(targets):
        raise UserError("is both --output_file and --test_file; name another", path=targets[0])
    size, seed = _SIZE if args.size is None else args.size, _SEED if args.seed is None else args.seed

    def generate() -> Parts:
        train, test = nl_rx_grammar.generate_split(size, args.test_size or 0, seed)
        return [make_record(*pair) for pair in train], [make_record(*pair) for pair in test]

    return _write_generated(targets, generate)


def _convert_nl_rx(args: argparse.Namespace) -> int:
    if args.source_file is None or args.target_file is None:
        raise UserError("the published files come in pairs; give both --source_file and --target_file")
    sources = [existing_file(name, "text file") for name in (args.source_file, args.target_file)]
    target = Path(args.output_file)
    if target.exists() and any(source.samefile(target) for source in sources):
        raise UserError("is both input and output; name another --output_file", path=target)
    sentences, regexes = (read_text(source).removesuffix("\n").split("\n") for source in sources)
    if len(sentences) != len(regexes):
        told = f"has {len(sentences)} lines, but {sources[1]} has {len(regexes)}; give two files of one data set"
        raise UserError(told, path=sources[0])
    if 2 * sum(" " in regex for regex in regexes) > len(regexes) > 2 * sum(" " in sentence for sentence in sentences):
        raise UserError("holds words where expressions are expected; are the two files swapped?", path=sources[1])
    target = refuse_existing(args.output_file, args.overwrite)
    rows = enumerate(({"sentence": s, "regex": r} for s, r in zip(sentences, regexes, strict=True)), start=1)
    records, counts = convert_rows(rows, lambda row: make_record(**row), path=args.source_file)
    write_records(Job(args.source_file, rows, target, None), records, counts)
    return 0


NL_RX = Preparation(
    "sentences and regular expressions: generated, or from the published files of NL-RX",
    _add_nl_rx_arguments,
    _run_nl_rx,
)
