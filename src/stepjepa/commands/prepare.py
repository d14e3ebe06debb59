"""``stepjepa prepare``: make training files from raw data sets, or generate them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stepjepa.arguments import DataFlags
from stepjepa.commands import prepare_generated
from stepjepa.commands.prepare_generated import add_overwrite, print_counts
from stepjepa.data.records import (
    ASSISTANT,
    CHATS,
    MOST_NAMES,
    USER,
    BadRecords,
    bad_records,
    tell_bad_records,
    to_messages,
)
from stepjepa.data.sources import FORMATS, Rows, read_rows
from stepjepa.errors import UserError, shown, visible
from stepjepa.files import existing_file, refuse_existing, write_jsonl
from stepjepa.options import add_options, add_switch, from_args
from stepjepa.preparing.conversion import (
    CONVERSIONS,
    FEW_STEPS,
    Conversion,
    Counts,
    StepOptions,
    convert_rows,
    load_splitter,
    prepare_records,
)

SUMMARY = "make training files: from published data sets, raw responses, or generated"

# With at most this many distinct answers, the answers are class labels, and their counts are printed.
_MOST_LABELS = 10
# Names are cut in messages: in a file without a header, the texts of the first row are taken for column names.
_LONGEST_NAME = 30


class _Job(NamedTuple):
    """Source and target, checked; ``rows`` are not read yet, ``limit`` is None for all records."""

    source: str
    rows: Rows
    target: Path
    limit: int | None
    bad: BadRecords | None


def _add_source_and_target(parser: argparse.ArgumentParser, rows: str, datasets: Sequence[str] = ()) -> None:
    """Add the flags of the source and the output, for a kind that reads raw rows.

    Args:
        parser: receives the flags.
        rows: description of the rows, for the help.
        datasets: names of such data sets on the hub, for the help.
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
        # Unwrapped: argparse would break the names, which users copy, at their hyphens.
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = "on the hub:\n" + "\n".join(f"  --dataset {name}" for name in datasets)


def _open_job(args: argparse.Namespace) -> _Job:
    """Check the flags of :func:`_add_source_and_target` before anything is read."""
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
    return _Job(source, rows, target, args.max_examples, bad)


def _write(
    job: _Job,
    records: Sequence[dict[str, Any]],
    counts: Counts,
    *,
    hint: str = "",
    more: Sequence[tuple[str, object]] = (),
) -> int:
    """Write the records and print what was kept, dropped and why; returns the exit code.

    Args:
        job: source and target.
        records: to be written; at least one.
        counts: the rows read and dropped while making the records.
        hint: appended to the error if there are no records.
        more: further lines of the table.

    Raises:
        UserError: there are no records.
    """
    reasons = counts.dropped.most_common()
    skipped = job.bad.count if job.bad else 0
    if not records:
        told = [f"{reason}: {count}" for reason, count in reasons]
        told += [job.bad.describe()] if job.bad and skipped else []
        raise UserError(f"no record could be kept ({'; '.join(told) or 'it is empty'}){hint}", path=job.source)
    write_jsonl(job.target, records)
    tell_bad_records(job.bad)
    print_counts(
        [
            ("read", counts.read),
            ("kept", len(records)),
            ("dropped", counts.dropped.total()),
            *((f"  {reason}", count) for reason, count in reasons),
            *([("bad, left out", skipped)] if skipped else []),
            *counts.changed.items(),
            *more,
        ]
    )
    labels = Counter(record["messages"][-1]["content"] for record in records)
    if len(labels) <= _MOST_LABELS < len(records):
        print("answers: " + ", ".join(f"{visible(str(label))} {count}" for label, count in labels.most_common()))
    print(f"written to {job.target}")
    return 0


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_source_and_target(parser, "rows with a column of questions and one of answers, or with one of whole chats")
    columns = parser.add_argument_group(
        "columns", "Without --columns: 'messages' or 'conversations' as they are; 'instruction' and 'input' together."
    )
    columns.add_argument(
        "--columns",
        nargs=2,
        metavar=("USER", "ASSISTANT"),
        help=f"columns of question and answer (the first of {', '.join(USER)}, and of {', '.join(ASSISTANT)})",
    )
    columns.add_argument("--system", metavar="NAME", help="column of a system prompt (none)")
    columns.add_argument("--system_prompt", metavar="TEXT", help="one system prompt for all rows (none)")


def _run_chat(args: argparse.Namespace) -> int:
    if args.system is not None and args.system_prompt is not None:
        raise UserError("--system and --system_prompt both say what the system prompt is; leave one out")
    job = _open_job(args)
    columns = None if args.columns is None else tuple(args.columns)

    def make_record(row: Mapping[str, Any]) -> dict[str, Any]:
        messages, _ = to_messages(row, columns, system=args.system, system_prompt=args.system_prompt)
        return {"messages": messages}

    return _write(job, *convert_rows(job.rows, make_record, limit=job.limit, path=job.source, bad=job.bad))


def _add_steps(parser: argparse.ArgumentParser) -> None:
    _add_source_and_target(parser, "rows with 'question' and a response")
    add_options(parser, StepOptions, "steps")
    parser.add_argument("--custom", metavar="MODULE:FUNCTION", help="your own splitter: response in, list of steps out")
    thinking = parser.add_argument_group("text between <think> and </think> (removed, and counted)")
    add_switch(thinking, "--keep_thinking", help="keep it, with its tags")
    add_switch(thinking, "--think_steps", help="its blocks, divided by blank lines, are the first steps")


def _run_steps(args: argparse.Namespace) -> int:
    if args.keep_thinking and args.think_steps:
        raise UserError("--keep_thinking and --think_steps exclude each other; leave one out")
    job = _open_job(args)
    options = from_args(
        StepOptions,
        args,
        splitter=None if args.custom is None else load_splitter(args.custom),
        thinking="keep" if args.keep_thinking else "steps" if args.think_steps else "remove",
    )
    records, counts = prepare_records(job.rows, options, job.source, job.limit, job.bad)
    steps = sum(record["total_steps"] for record in records)
    more = [("steps per record", f"{steps / len(records):.2f}")] if records else []
    hint = ""
    if any(reason.startswith("no field") for reason in counts.dropped):
        there = ", ".join(map(shown, counts.columns[:MOST_NAMES]))
        hint = f"; name the fields with --question_field and --response_field (there is {there})"
        if any(name in counts.columns for name in CHATS):
            hint += ", or read whole chats with 'stepjepa prepare chat'"
    if FEW_STEPS in counts.dropped:
        hint = "; steps are told by blank lines, 'Step 2:' or '2.'; for others name a function of yours with --custom"
    return _write(job, records, counts, hint=hint, more=more)


def _add_conversion(conversion: Conversion, parser: argparse.ArgumentParser) -> None:
    _add_source_and_target(parser, f"rows with {conversion.rows}", conversion.datasets)
    if conversion is CONVERSIONS["gsm8k"]:
        group = parser.add_argument_group("solution")
        group.add_argument(
            "--format",
            choices=("plain", "steps"),
            default="plain",
            help="plain: as it is; steps: a blank line between its lines, so that each is a step (plain)",
        )
        group.add_argument(
            "--socratic",
            choices=("keep", "strip"),
            default="keep",
            help="the question in front of each line of the socratic variant, 'question ** answer' (keep)",
        )
        group.add_argument(
            "--calculator", choices=("keep", "strip"), default="keep", help="annotations such as <<48/2=24>> (keep)"
        )


def _run_conversion(conversion: Conversion, args: argparse.Namespace) -> int:
    job = _open_job(args)
    options = {}
    if conversion is CONVERSIONS["gsm8k"]:
        options = {name: getattr(args, name) == "keep" for name in ("socratic", "calculator")}
        options["steps"] = args.format == "steps"
    convert = partial(conversion.convert, **options)
    records, counts = convert_rows(job.rows, convert, limit=job.limit, path=job.source, bad=job.bad)
    names = ", ".join(name[:_LONGEST_NAME] for name in counts.columns[:MOST_NAMES])
    return _write(job, records, counts, hint=f"; expected {conversion.rows}, got {names}" if names else "")


_AddArguments = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace], int]

PREPARATIONS: dict[str, tuple[str, _AddArguments, _Run]] = {
    "chat": ("training records of any table with questions and answers, or with whole chats", _add_chat, _run_chat),
    "steps": ("training records with marked steps, from the responses of a reasoning model", _add_steps, _run_steps),
    **{
        name: (conversion.summary, partial(_add_conversion, conversion), partial(_run_conversion, conversion))
        for name, conversion in CONVERSIONS.items()
    },
    "stepmath": (
        "generated word problems, train and test, each step in need of the one before",
        prepare_generated.add_stepmath,
        prepare_generated.run_stepmath,
    ),
    "nl-rx": (
        "sentences and regular expressions: generated, or from the published files of NL-RX",
        prepare_generated.add_nl_rx,
        prepare_generated.run_nl_rx,
    ),
}
"""Kind -> (one line of help, function that adds its flags, function that runs it)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a sub-command for each of :data:`PREPARATIONS`."""
    kinds = parser.add_subparsers(dest="preparation", required=True, metavar="KIND", title="kinds")
    for name, (summary, add, _) in PREPARATIONS.items():
        # Accept underscores too: the names of data sets are spelt both ways.
        other = [name.replace("-", "_")] if "-" in name else []
        add(kinds.add_parser(name, aliases=other, help=summary, description=summary, allow_abbrev=False))


def run(args: argparse.Namespace) -> int:
    """Run the preparation that was chosen.

    Raises:
        UserError: an input is missing or wrong, an output is there already, or a setting is out of range.
    """
    return PREPARATIONS[args.preparation.replace("_", "-")][2](args)
