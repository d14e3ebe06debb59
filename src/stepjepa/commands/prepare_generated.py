"""``stepjepa prepare stepmath`` and ``nl-rx``: generate records, or read the published pair of NL-RX files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.files import atomic_write, existing_file, read_text, refuse_existing
from stepjepa.options import FROM_ONE, add_options, add_switch, from_args, option
from stepjepa.tasks import nl_rx, stepmath
from stepjepa.tasks.raw_values import Unusable

Parts = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def add_overwrite(group: argparse._ArgumentGroup) -> None:
    """Add ``--overwrite``, which allows existing files to be replaced."""
    add_switch(group, "--overwrite", help="replace files that are there already")


def print_counts(rows: Sequence[tuple[str, object]]) -> None:
    """Print a table of names and values on standard output."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value:>7}")


def _write_files(targets: Sequence[Path], parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, object]]:
    """Write JSON Lines files that belong together: none gets its final name before all are written."""
    with ExitStack() as stack:
        streams = [stack.enter_context(atomic_write(target)) for target in targets]
        for stream, records in zip(streams, parts, strict=True):
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            stream.flush()  # a full disk raises here, before any file has its final name
    return [(f"written to {target}", len(records)) for target, records in zip(targets, parts, strict=True)]


def _generate(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a generator; its ``ValueError``, which begins with a setting's name, becomes a ``UserError``."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise UserError(f"--{error}") from error


@dataclass
class StepmathFlags:
    """Number of problems, and the seed."""

    train_size: int = option(8000, metavar="N", allowed=FROM_ONE)
    test_size: int = option(500, metavar="N", allowed=FROM_ONE)
    seed: int = option(0, "the same seed gives the same files", metavar="N")


def add_stepmath(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``stepjepa prepare stepmath``."""
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="gets train.jsonl and test.jsonl")
    add_options(parser, StepmathFlags, "options")
    add_options(parser, stepmath.Difficulty, "difficulty")
    add_overwrite(parser.add_argument_group("output"))


def run_stepmath(args: argparse.Namespace) -> int:
    """Generate word problems: a training file and a test file."""
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file where a folder is needed; name another --output_dir", path=folder)
    targets = [refuse_existing(folder / f"{part}.jsonl", args.overwrite) for part in ("train", "test")]
    level = _generate(from_args, stepmath.Difficulty, args)
    parts: Parts = _generate(stepmath.generate_split, args.train_size, args.test_size, args.seed, level)
    rows = _write_files(targets, parts)
    steps = [record["total_steps"] for records in parts for record in records]
    print_counts([*rows, ("steps per record", f"{sum(steps) / len(steps):.2f}")])
    return 0


@dataclass
class NlRxFlags:
    """Records generated from the grammar."""

    size: int = option(10_000, "records", metavar="N", allowed=FROM_ONE)
    seed: int = option(0, "the same seed gives the same files", metavar="N")
    test_size: int | None = option(
        None, "further records to test with; needs --test_file", metavar="N", allowed=FROM_ONE
    )
    test_file: str | None = option(None, "where those go", metavar="FILE")


def add_nl_rx(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``stepjepa prepare nl-rx``."""
    add_options(parser, NlRxFlags, "generated from the grammar")
    published = parser.add_argument_group("from the published pair of files instead, line by line")
    published.add_argument("--source_file", metavar="FILE", help="sentences (NL-RX-Synth.src.txt)")
    published.add_argument("--target_file", metavar="FILE", help="their regular expressions (NL-RX-Synth.targ.txt)")
    parser.add_argument("--output_file", required=True, metavar="FILE", help="JSON lines with 'messages'")
    add_overwrite(parser.add_argument_group("output"))


def run_nl_rx(args: argparse.Namespace) -> int:
    """Generate pairs of a sentence and an expression, or read the published ones."""
    if (args.test_size is None) != (args.test_file is None):
        raise UserError("give both --test_size and --test_file, or neither")
    if (args.source_file is None) != (args.target_file is None):
        raise UserError("the published files come in pairs; give both --source_file and --target_file")
    generated = [each.name for each in fields(NlRxFlags) if getattr(args, each.name) != each.default]
    if args.source_file and generated:
        raise UserError(f"--{generated[0]} is for generated records, --source_file for published ones; leave one out")
    names = [args.output_file] if args.test_file is None else [args.output_file, args.test_file]
    targets = [refuse_existing(name, args.overwrite) for name in names]
    if len({target.resolve() for target in targets}) < len(targets):
        raise UserError("is both --output_file and --test_file; name another", path=targets[0])
    if args.source_file:
        records = _read_published(args.source_file, args.target_file)
        print_counts(_write_files(targets, [records]))
        return 0
    parts: tuple[list[tuple[str, str]], ...]
    parts = _generate(nl_rx.generate_split, args.size, args.test_size or 0, args.seed)[: len(targets)]
    print_counts(_write_files(targets, [[nl_rx.make_record(*pair) for pair in pairs] for pairs in parts]))
    return 0


def _read_published(source_file: str, target_file: str) -> list[dict[str, Any]]:
    """Make records from a file of sentences and a file of their regular expressions, line by line."""
    sources = [existing_file(name, "text file") for name in (source_file, target_file)]
    sentences, regexes = (read_text(source).removesuffix("\n").split("\n") for source in sources)
    if len(sentences) != len(regexes):
        told = f"has {len(sentences)} lines, but {sources[1]} has {len(regexes)}; give two files of one data set"
        raise UserError(told, path=sources[0])
    records = []
    for line, pair in enumerate(zip(sentences, regexes, strict=True), start=1):
        try:
            records.append(nl_rx.make_record(*pair))
        except Unusable as reason:
            told = f"{reason}; correct or remove the line in both files"
            raise UserError(told, path=source_file, line=line) from None
    return records
