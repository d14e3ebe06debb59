"""``stepjepa prepare``: make training files from raw data sets, or generate them."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write, check_output_file, existing_file
from stepjepa.base.terminal import note, print_rows
from stepjepa.cli.commands import Command
from stepjepa.cli.parser import Parser, check_exclusive, from_args
from stepjepa.config.option import FROM_ONE, load, option
from stepjepa.data.columns import ASSISTANT, MOST_NAMES, USER
from stepjepa.data.records import BadRecords, named
from stepjepa.data.sources import FORMATS, read_rows
from stepjepa.preparing.conversion import (
    CONVERSIONS,
    Convert,
    StepOptions,
    convert_chat,
    convert_response,
    convert_rows,
)
from stepjepa.tasks import nl_rx, stepmath
from stepjepa.tasks.raw_values import chat_record


@dataclass(kw_only=True)
class SourceFlags:
    """The source of raw rows, and the output of records."""

    input_file: str | None = option(None, f"{', '.join(FORMATS)}; or name a --dataset", metavar="FILE")
    dataset: str | None = option(None, "data set of the hub, or folder of one", metavar="NAME")
    subset: str | None = option(None, "configuration of the data set, where it has several", metavar="NAME")
    split: str | None = option(None, "train, test ...; needed where there are several", metavar="NAME")
    bad_records: Literal["error", "skip"] = option("error", "rows that are not valid; skip: count and skip them")
    output_file: str = option(help="JSON lines with 'messages'", metavar="FILE", group="output")
    max_examples: int | None = option(None, "stop after so many records (all)", allowed=FROM_ONE, group="output")
    overwrite: bool = option(False, "replace files that are there already", group="output")


@dataclass
class ChatFlags:
    """Columns of a table; without them 'messages', 'conversations', or the usual ones, with 'system' and 'history'."""

    columns: list[str] | None = option(
        None, f"of question and answer (the first of {', '.join(USER)}, and of {', '.join(ASSISTANT)})", metavar="NAME"
    )
    system: str | None = option(None, "column of a system prompt (none)", metavar="NAME")
    system_prompt: str | None = option(None, "one system prompt for all rows (none)")


@dataclass
class SplitFlags:
    """A custom splitter of responses; text in ``<think>`` is removed before."""

    custom: str | None = option(None, "custom splitter: response in, list of steps out", metavar="MODULE:FUNCTION")


@dataclass
class Gsm8kFlags:
    """The form of solutions."""

    format: Literal["plain", "steps"] = option("plain", "steps: a blank line between lines, so that each is a step")
    socratic: Literal["keep", "strip"] = option("keep", "the question in front of each line of the socratic variant")
    calculator: Literal["keep", "strip"] = option("keep", "annotations such as <<48/2=24>>")


def _run_rows(args: argparse.Namespace) -> int:
    """Convert the rows of a source, write the records, and print what was kept, dropped and why."""
    if (args.input_file is None) == (args.dataset is None):
        raise UserError("name the source with either --input_file or --dataset")
    convert, expected = _converter(args)
    name, bad = args.dataset or existing_file(args.input_file, "raw file"), BadRecords(args.bad_records)
    rows = read_rows(str(name), split=args.split, subset=args.subset, bad=bad)
    target = check_output_file(args.output_file, args.overwrite)
    if target.exists() and Path(name).exists() and target.samefile(name):
        raise UserError("is both input and output; name another --output_file", path=target)
    records, counts = convert_rows(rows, convert, path=str(name), limit=args.max_examples, bad=bad)
    reasons = counts.dropped.most_common()
    if not records:
        causes = [f"{reason}: {count}" for reason, count in reasons] + ([bad.describe()] if bad.count else [])
        hint = f"; expected {expected}, got {', '.join(counts.columns[:MOST_NAMES])}" if counts.columns else ""
        raise UserError(f"no record could be kept ({'; '.join(causes) or 'it is empty'}){hint}", path=name)
    bad.tell()
    if counts.unused:
        note(f"not used: {named(counts.unused)}")
    rows_of_counts = [("read", counts.read), ("kept", len(records)), ("dropped", counts.dropped.total()), *reasons]
    rows_of_counts += [("bad, skipped", bad.count)] if bad.count else []
    print_rows([(name, str(count)) for name, count in rows_of_counts])
    return _write_files({target: records})


def _converter(args: argparse.Namespace) -> tuple[Convert, str]:
    """Return the function that makes a record of a row, and the fields that it expects."""
    kind = args.preparation
    if kind == "chat":
        check_exclusive(args, ("system", "system_prompt"))
        columns = {name: getattr(args, name) for name in ("columns", "system", "system_prompt")}
        return partial(convert_chat, **columns), "--columns"
    if kind == "steps":
        splitter = {} if args.custom is None else {"splitter": load("custom", args.custom)}
        options = from_args(StepOptions, args, **splitter)
        expected = "--question_field and --response_field, steps divided by blank lines, or --custom"
        return partial(convert_response, options=options), expected
    convert = CONVERSIONS[kind].convert
    if kind == "gsm8k":
        keep = {name: getattr(args, name) == "keep" for name in ("socratic", "calculator")}
        convert = partial(convert, **keep, steps=args.format == "steps")
    return convert, CONVERSIONS[kind].rows


def _write_files(files: Mapping[Path, Sequence[Mapping[str, object]]]) -> int:
    """Write JSON Lines files that belong together: none gets its final name before all are written."""
    with ExitStack() as stack:
        for target, records in files.items():
            stream = stack.enter_context(atomic_write(target))
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            stream.flush()  # a full disk raises here, before any file has its final name
    for target, records in files.items():
        print(f"written: {target} ({len(records)} records)")
    return 0


@dataclass(kw_only=True)
class GeneratorFlags:
    """Settings of both generators."""

    overwrite: bool = option(False, "replace files that are there already")
    seed: int = option(0, "the same seed gives the same files")


@dataclass(kw_only=True)
class StepmathFlags(GeneratorFlags):
    """Number of problems, and where they are written."""

    output_dir: str = option(help="gets train.jsonl and test.jsonl", metavar="DIR")
    train_size: int = option(8000, "records of train.jsonl", allowed=FROM_ONE)
    test_size: int = option(500, "records of test.jsonl", allowed=FROM_ONE)


def _run_stepmath(args: argparse.Namespace) -> int:
    targets = [check_output_file(Path(args.output_dir, f"{part}.jsonl"), args.overwrite) for part in ("train", "test")]
    level = from_args(stepmath.Difficulty, args)
    parts = stepmath.generate_split(args.train_size, args.test_size, args.seed, level)
    return _write_files(dict(zip(targets, parts, strict=True)))


@dataclass(kw_only=True)
class NlRxFlags(GeneratorFlags):
    """Number of pairs, and where they are written."""

    output_file: str = option(help="JSON lines with 'messages'", metavar="FILE")
    test_file: str | None = option(None, "further records, to test with", metavar="FILE")
    size: int = option(10_000, "records", allowed=FROM_ONE)
    test_size: int | None = option(None, "records of --test_file", allowed=FROM_ONE)


def _run_nl_rx(args: argparse.Namespace) -> int:
    if (args.test_size is None) != (args.test_file is None):
        raise UserError("give both --test_size and --test_file, or neither")
    names = [name for name in (args.output_file, args.test_file) if name is not None]
    targets = [check_output_file(name, args.overwrite) for name in names]
    if len({target.resolve() for target in targets}) < len(targets):
        raise UserError("is both --output_file and --test_file; name another", path=targets[0])
    parts = nl_rx.generate_split(args.size, args.test_size or 0, args.seed)
    records = ([chat_record(nl_rx.NlRxTask.system_prompt, *pair) for pair in part] for part in parts)
    return _write_files(dict(zip(targets, records, strict=False)))


SOURCE = (SourceFlags, "source")
STEPMATH = ((StepmathFlags, "options"), (stepmath.Difficulty, "difficulty"))

KINDS: dict[str, tuple[str, tuple[tuple[type, str], ...], Callable[[argparse.Namespace], int]]] = {
    "chat": ("any table of questions and answers, or of whole chats", (SOURCE, (ChatFlags, "columns")), _run_rows),
    "steps": ("responses of a reasoning model", (SOURCE, (StepOptions, "steps"), (SplitFlags, "steps")), _run_rows),
    **{
        name: (
            f"{each.summary}; rows with {each.rows}",
            (SOURCE, (Gsm8kFlags, "solution")) if name == "gsm8k" else (SOURCE,),
            _run_rows,
        )
        for name, each in CONVERSIONS.items()
    },
    "stepmath": ("generated word problems, each step in need of the one before", STEPMATH, _run_stepmath),
    "nl-rx": ("generated sentences and regular expressions, as in NL-RX", ((NlRxFlags, "options"),), _run_nl_rx),
}
"""Kind of preparation -> what it reads or makes, its flags, and the function that runs it."""


def add_kinds(parser: Parser) -> None:
    """Add a sub-command for each of :data:`KINDS`."""
    kinds = parser.add_subparsers(dest="preparation", required=True, metavar="KIND", title="kinds")
    for name, (summary, flags, _) in KINDS.items():
        inner = kinds.add_parser(name, help=summary.partition(";")[0], description=summary)
        for settings, group in flags:
            inner.add(settings, group)


PREPARE = Command(lambda args: KINDS[args.preparation][2](args), add=add_kinds)
