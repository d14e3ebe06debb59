"""``stepjepa prepare``: make training files from raw data sets, or generate them."""

# ruff: noqa: RUF009  # option() makes the field

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stepjepa.commands import Command
from stepjepa.data.formats import ASSISTANT, MOST_NAMES, USER, to_messages
from stepjepa.data.records import BadRecords, bad_records, tell_bad_records
from stepjepa.data.sources import FORMATS, Rows, read_rows
from stepjepa.errors import UserError, visible
from stepjepa.files import atomic_write, existing_file, read_text, refuse_existing
from stepjepa.options import FROM_ONE, Parser, from_args, option, refuse_both
from stepjepa.preparing.conversion import CONVERSIONS, Conversion, Counts, convert_rows
from stepjepa.preparing.step_preparation import StepOptions, load_splitter, prepare_records
from stepjepa.tasks import nl_rx_grammar, stepmath
from stepjepa.tasks.nl_rx import make_record
from stepjepa.tasks.raw_values import Unusable

_MOST_LABELS = 10
"""With at most this many distinct answers, the answers are class labels, and their counts are printed."""

_LONGEST_NAME = 30
"""Most characters of a column in a message: without a header, the texts of the first row are taken for names."""

Files = Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]


@dataclass(kw_only=True)
class SourceFlags:
    """Where raw rows are read, and where records are written."""

    input_file: str | None = option(None, f"{', '.join(FORMATS)}; or name a --dataset", metavar="FILE")
    dataset: str | None = option(None, "data set of the hub, or folder of one", metavar="NAME")
    subset: str | None = option(None, "configuration of the data set, where it has several", metavar="NAME")
    split: str | None = option(None, "train, test ...; needed where there are several", metavar="NAME")
    bad_records: Literal["error", "skip"] = option("error", "rows that are not valid; skip: count and skip them")
    output_file: str = option(help="JSON lines with 'messages'", metavar="FILE", group="output")
    max_examples: int | None = option(None, "stop after so many records (all)", allowed=FROM_ONE, group="output")
    overwrite: bool = option(False, "replace files that are there already", group="output")


class Source(NamedTuple):
    """Rows of a source, not read yet, and the file that their records go to."""

    name: str
    rows: Rows
    target: Path
    bad: BadRecords | None


def _open_source(args: argparse.Namespace) -> Source:
    """Check :class:`SourceFlags` before anything is read."""
    if (args.input_file is None) == (args.dataset is None):
        raise UserError("name the source with either --input_file or --dataset")
    if args.input_file is not None:
        existing_file(args.input_file, "raw file")
    name, bad = args.dataset or args.input_file, bad_records(args.bad_records)
    rows = read_rows(name, split=args.split, subset=args.subset, bad=bad)
    target = refuse_existing(args.output_file, args.overwrite)
    if target.exists() and Path(name).exists() and target.samefile(name):
        raise UserError("is both input and output; name another --output_file", path=target)
    return Source(name, rows, target, bad)


def _write(source: Source, records: Sequence[dict[str, Any]], counts: Counts, expected: str = "") -> int:
    """Write the records and print what was kept, dropped and why; returns the exit code.

    Raises:
        UserError: there are no records; then the message says which fields were ``expected``.
    """
    reasons = counts.dropped.most_common()
    skipped = source.bad.count if source.bad else 0
    if not records:
        told = [f"{reason}: {count}" for reason, count in reasons]
        told += [source.bad.describe()] if source.bad and skipped else []
        there = ", ".join(name[:_LONGEST_NAME] for name in counts.columns[:MOST_NAMES])
        hint = f"; expected {expected}, got {there}" if there and expected else ""
        raise UserError(f"no record could be kept ({'; '.join(told) or 'it is empty'}){hint}", path=source.name)
    tell_bad_records(source.bad)
    rows: list[tuple[str, object]] = [
        ("read", counts.read),
        ("kept", len(records)),
        ("dropped", counts.dropped.total()),
    ]
    rows += [(f"  {reason}", count) for reason, count in reasons]
    rows += [("bad, left out", skipped)] if skipped else []
    _write_files([(source.target, records)], [*rows, *counts.changed.items()])
    labels = Counter(record["messages"][-1]["content"] for record in records)
    if len(labels) <= _MOST_LABELS < len(records):
        print("answers: " + ", ".join(f"{visible(str(label))} {count}" for label, count in labels.most_common()))
    return 0


def _write_files(files: Files, rows: Sequence[tuple[str, object]] = ()) -> None:
    """Write JSON Lines files that belong together: none gets its final name before all are written. Print counts."""
    with ExitStack() as stack:
        streams = [stack.enter_context(atomic_write(target)) for target, _ in files]
        for stream, (_, records) in zip(streams, files, strict=True):
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            stream.flush()  # a full disk raises here, before any file has its final name
    written = [(f"written to {target}", len(records)) for target, records in files]
    steps = [record["total_steps"] for _, records in files for record in records if "total_steps" in record]
    mean = [("steps per record", f"{sum(steps) / len(steps):.2f}")] if steps else []
    shown = [*rows, *mean, *written]
    width = max(len(name) for name, _ in shown)
    print("\n".join(f"{name:<{width}}  {value:>7}" for name, value in shown))


@dataclass
class ChatFlags:
    """Columns of a table; without them 'messages' or 'conversations', or 'instruction' with 'input'."""

    columns: list[str] | None = option(
        None, f"of question and answer (the first of {', '.join(USER)}, and of {', '.join(ASSISTANT)})", metavar="NAME"
    )
    system: str | None = option(None, "column of a system prompt (none)", metavar="NAME")
    system_prompt: str | None = option(None, "one system prompt for all rows (none)")


def _run_chat(args: argparse.Namespace) -> int:
    refuse_both(args, ("system", "system_prompt"))
    source, columns = _open_source(args), args.columns and tuple(args.columns)

    def convert(row: Mapping[str, Any]) -> dict[str, Any]:
        return {"messages": to_messages(row, columns, system=args.system, system_prompt=args.system_prompt)[0]}

    return _write(
        source, *convert_rows(source.rows, convert, limit=args.max_examples, path=source.name, bad=source.bad)
    )


@dataclass
class SplitFlags:
    """How responses are split."""

    custom: str | None = option(
        None, "your own splitter: response in, list of steps out", metavar="MODULE:FUNCTION", group="steps"
    )
    keep_thinking: bool = option(False, "keep text in <think>, with its tags; otherwise it is removed, and counted")
    think_steps: bool = option(False, "blocks of text in <think>, divided by blank lines, are the first steps")


def _run_steps(args: argparse.Namespace) -> int:
    refuse_both(args, ("keep_thinking", "think_steps"))
    source = _open_source(args)
    splitter = None if args.custom is None else load_splitter(args.custom)
    thinking = "keep" if args.keep_thinking else "steps" if args.think_steps else "remove"
    options = from_args(StepOptions, args, splitter=splitter, thinking=thinking)
    found = prepare_records(source.rows, options, source.name, args.max_examples, source.bad)
    return _write(source, *found, "--question_field and --response_field, steps divided by blank lines, or --custom")


@dataclass
class Gsm8kFlags:
    """How solutions are written."""

    format: Literal["plain", "steps"] = option("plain", "steps: a blank line between lines, so that each is a step")
    socratic: Literal["keep", "strip"] = option("keep", "the question in front of each line of the socratic variant")
    calculator: Literal["keep", "strip"] = option("keep", "annotations such as <<48/2=24>>")


def _run_conversion(conversion: Conversion, args: argparse.Namespace) -> int:
    source, convert = _open_source(args), conversion.convert
    if conversion is CONVERSIONS["gsm8k"]:
        kept = {name: getattr(args, name) == "keep" for name in ("socratic", "calculator")}
        convert = partial(convert, **kept, steps=args.format == "steps")
    found = convert_rows(source.rows, convert, limit=args.max_examples, path=source.name, bad=source.bad)
    return _write(source, *found, conversion.rows)


@dataclass(kw_only=True)
class StepmathFlags:
    """Number of problems, and the seed."""

    output_dir: str = option(help="gets train.jsonl and test.jsonl", metavar="DIR", group="output")
    overwrite: bool = option(False, "replace files that are there already", group="output")
    train_size: int = option(8000, metavar="N", allowed=FROM_ONE)
    test_size: int = option(500, metavar="N", allowed=FROM_ONE)
    seed: int = option(0, "the same seed gives the same files", metavar="N")


def _run_stepmath(args: argparse.Namespace) -> int:
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file where a folder is needed; name another --output_dir", path=folder)
    targets = [refuse_existing(folder / f"{part}.jsonl", args.overwrite) for part in ("train", "test")]
    level = _generate(from_args, stepmath.Difficulty, args)
    parts = _generate(stepmath.generate_split, args.train_size, args.test_size, args.seed, level)
    _write_files(list(zip(targets, parts, strict=True)))
    return 0


def _generate(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a generator; its ``ValueError``, which begins with a setting's name, becomes a ``UserError``."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise UserError(f"--{error}") from error


@dataclass
class NlRxFlags:
    """Records generated from the grammar, or read from the published pair of files."""

    size: int = option(10_000, "records", metavar="N", allowed=FROM_ONE)
    seed: int = option(0, "the same seed gives the same files", metavar="N")
    test_size: int | None = option(None, "further records to test with; needs --test_file", allowed=FROM_ONE)
    test_file: str | None = option(None, "where those go", metavar="FILE")


@dataclass(kw_only=True)
class NlRxFiles:
    """The published files, and the output."""

    source_file: str | None = option(None, "sentences (NL-RX-Synth.src.txt)", metavar="FILE")
    target_file: str | None = option(None, "their regular expressions (NL-RX-Synth.targ.txt)", metavar="FILE")
    output_file: str = option(help="JSON lines with 'messages'", metavar="FILE", group="output")
    overwrite: bool = option(False, "replace files that are there already", group="output")


def _run_nl_rx(args: argparse.Namespace) -> int:
    for first, second in (("test_size", "test_file"), ("source_file", "target_file")):
        if (getattr(args, first) is None) != (getattr(args, second) is None):
            raise UserError(f"give both --{first} and --{second}, or neither")
    generated = [each.name for each in fields(NlRxFlags) if getattr(args, each.name) != each.default]
    if args.source_file and generated:
        raise UserError(f"--{generated[0]} is for generated records, --source_file for published ones; leave one out")
    names = [args.output_file] if args.test_file is None else [args.output_file, args.test_file]
    targets = [refuse_existing(name, args.overwrite) for name in names]
    if len({target.resolve() for target in targets}) < len(targets):
        raise UserError("is both --output_file and --test_file; name another", path=targets[0])
    if args.source_file:
        _write_files([(targets[0], _read_published(args.source_file, args.target_file))])
        return 0
    parts = _generate(nl_rx_grammar.generate_split, args.size, args.test_size or 0, args.seed)
    _write_files(
        [(target, [make_record(*pair) for pair in part]) for target, part in zip(targets, parts, strict=False)]
    )
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
            records.append(make_record(*pair))
        except Unusable as reason:
            raise UserError(
                f"{reason}; correct or remove the line in both files", path=source_file, line=line
            ) from None
    return records


class Kind(NamedTuple):
    """A kind of preparation: one line of help, its flags, its function, and names of such data sets on the hub."""

    summary: str
    flags: tuple[tuple[type, str], ...]
    run: Callable[[argparse.Namespace], int]
    datasets: tuple[str, ...] = ()


SOURCE = (SourceFlags, "source")

KINDS = {
    "chat": Kind(
        "training records of any table with questions and answers, or with whole chats",
        (SOURCE, (ChatFlags, "columns")),
        _run_chat,
    ),
    "steps": Kind(
        "training records with marked steps, from the responses of a reasoning model",
        (SOURCE, (StepOptions, "steps"), (SplitFlags, "text between <think> and </think>")),
        _run_steps,
    ),
    **{
        name: Kind(
            f"{each.summary}; of rows with {each.rows}",
            (SOURCE, (Gsm8kFlags, "solution")) if name == "gsm8k" else (SOURCE,),
            partial(_run_conversion, each),
            each.datasets,
        )
        for name, each in CONVERSIONS.items()
    },
    "stepmath": Kind(
        "generated word problems, train and test, each step in need of the one before",
        ((StepmathFlags, "options"), (stepmath.Difficulty, "difficulty")),
        _run_stepmath,
    ),
    "nl-rx": Kind(
        "sentences and regular expressions: generated, or from the published files of NL-RX",
        ((NlRxFlags, "generated from the grammar"), (NlRxFiles, "from the published pair of files, line by line")),
        _run_nl_rx,
    ),
}


def add_kinds(parser: Parser) -> None:
    """Add a sub-command for each of :data:`KINDS`."""
    kinds = parser.add_subparsers(dest="preparation", required=True, metavar="KIND", title="kinds")
    for name, kind in KINDS.items():
        # Accept underscores too: the names of data sets are spelt both ways.
        other = [name.replace("-", "_")] if "-" in name else []
        hub = "on the hub:\n" + "\n".join(f"  --dataset {each}" for each in kind.datasets) if kind.datasets else None
        inner = kinds.add_parser(name, aliases=other, help=kind.summary, description=kind.summary, epilog=hub)
        for settings, group in kind.flags:
            inner.add(settings, group)


def run(args: argparse.Namespace) -> int:
    """Run the preparation that was chosen.

    Raises:
        UserError: an input is missing or wrong, an output is there already, or a setting is out of range.
    """
    return KINDS[args.preparation.replace("_", "-")].run(args)


PREPARE = Command(run, add=add_kinds)
