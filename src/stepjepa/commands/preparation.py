"""What the kinds of ``stepjepa prepare`` have in common: where rows come from, where records go, what is printed."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from stepjepa.arguments import DataFlags
from stepjepa.data.records import BadRecords, bad_records, tell_bad_records
from stepjepa.data.sources import FORMATS, Rows, read_rows
from stepjepa.errors import UserError, visible
from stepjepa.files import atomic_write, existing_file, refuse_existing, write_jsonl
from stepjepa.options import add_options, add_switch
from stepjepa.preparing.conversion import Counts

# A task with more different answers has no labels.
_MOST_LABELS = 10


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


class Job(NamedTuple):
    """From where to where, checked.

    Attributes:
        source: file or name of the data set, for messages.
        rows: with their line numbers, not read yet.
        target: the file to be written.
        limit: most records to be written; None for all.
        bad: takes the rows that are wrong; None makes the first of them an error.
    """

    source: str
    rows: Rows
    target: Path
    limit: int | None
    bad: BadRecords | None = None


def add_source_and_target(parser: argparse.ArgumentParser, rows: str, datasets: Sequence[str] = ()) -> None:
    """The flags of every kind that reads raw rows.

    Args:
        parser: gets them.
        rows: what a row holds, for the help.
        datasets: such data sets on the hub, for the help.
    """
    source = parser.add_argument_group("source (one of the first two)")
    source.add_argument("--input_file", metavar="FILE", help=f"{rows}; {', '.join(FORMATS)}")
    source.add_argument("--dataset", metavar="NAME", help="data set of the hub, or folder of one")
    source.add_argument("--subset", metavar="NAME", help="configuration of the data set, where it has several")
    source.add_argument("--split", metavar="NAME", help="train, test ...; needed where there are several")
    add_options(parser, DataFlags, "source (one of the first two)", only=("bad_records",))
    target = parser.add_argument_group("output")
    target.add_argument("--output_file", required=True, metavar="FILE", help="JSON lines with 'messages'")
    target.add_argument("--max_examples", type=int, metavar="N", help="stop after so many records (all)")
    add_overwrite(target)
    if datasets:
        # As it stands: names are to be copied, and lines would be broken at their hyphens.
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = "on the hub:\n" + "\n".join(f"  --dataset {name}" for name in datasets)


def open_job(args: argparse.Namespace) -> Job:
    """Check the flags of :func:`add_source_and_target` before anything is read.

    Raises:
        UserError: the source is not named by exactly one flag or missing, the output is there already or the same
            file, or a number is out of range.
    """
    if (args.input_file is None) == (args.dataset is None):
        raise UserError("name the source with either --input_file or --dataset")
    if args.max_examples is not None and args.max_examples < 1:
        raise UserError(f"--max_examples: expected 1 or more, got {args.max_examples}")
    if args.input_file is not None:
        existing_file(args.input_file, "raw file")
    source = args.dataset if args.input_file is None else args.input_file
    bad = bad_records(args.bad_records)
    rows = read_rows(source, split=args.split, subset=args.subset, bad=bad)
    target = refuse_existing(args.output_file, args.overwrite)
    if target.exists() and Path(source).exists() and target.samefile(source):
        raise UserError("is both input and output; name another --output_file", path=target)
    return Job(source, rows, target, args.max_examples, bad)


def write_files(targets: Sequence[Path], parts: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Write several files of JSON lines that belong together: none takes its name before all are written."""
    with ExitStack() as stack:
        streams = [stack.enter_context(atomic_write(target)) for target in targets]
        for stream, records in zip(streams, parts, strict=True):
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            stream.flush()  # a full disk shows here, not when the first file has its name already


def write_records(
    job: Job,
    records: Sequence[dict[str, Any]],
    counts: Counts,
    *,
    hint: str = "",
    more: Sequence[tuple[str, object]] = (),
) -> None:
    """Write the records and print what was kept, dropped and why.

    Args:
        job: where to.
        records: at least one.
        counts: of the rows that they were made of.
        hint: what to check where nothing could be kept.
        more: further lines of the table.

    Raises:
        UserError: there are no records.
    """
    reasons = counts.dropped.most_common()
    left_out = 0 if job.bad is None else job.bad.count
    if not records:
        told = [f"{reason}: {count}" for reason, count in reasons]
        if job.bad is not None and left_out:
            told.append(job.bad.describe())
        raise UserError(f"no record could be kept ({'; '.join(told) or 'it is empty'}){hint}", path=job.source)
    write_jsonl(job.target, records)
    tell_bad_records(job.bad)
    print_counts(
        [
            ("read", counts.read),
            ("kept", len(records)),
            ("dropped", counts.dropped.total()),
            *((f"  {reason}", count) for reason, count in reasons),
            *([("bad, left out", left_out)] if left_out else []),
            *counts.changed.items(),
            *more,
        ]
    )
    labels = Counter(record["messages"][-1]["content"] for record in records)
    if len(labels) <= _MOST_LABELS < len(records):
        print("answers: " + ", ".join(f"{visible(str(label))} {count}" for label, count in labels.most_common()))
    print(f"written to {job.target}")


def print_counts(rows: Sequence[tuple[str, object]]) -> None:
    """A table of two columns on standard output: what, and how many."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value:>7}")


def add_overwrite(group: argparse._ArgumentGroup) -> None:
    """The flag that allows files to be replaced."""
    add_switch(group, "--overwrite", help="replace files that are there already")
