"""Make training files from the rows of a raw data set, or from generated problems."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write, check_output_file, claimed_output, existing_file
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note, print_rows
from stepjepa.config.option import FROM_ONE, check_effects, option
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.columns import MOST_NAMES
from stepjepa.data.formats import FORMATS
from stepjepa.data.reading_notes import named
from stepjepa.data.sources import parts_of_name, read_rows
from stepjepa.preparing.conversion import OF_RESPONSES, Convert, convert_rows
from stepjepa.preparing.holding_out import hold_out
from stepjepa.tasks import nl_rx_grammar, stepmath
from stepjepa.tasks.nl_rx import NlRxTask
from stepjepa.tasks.raw_values import chat_record


@dataclass(kw_only=True)
class SourceSettings:
    """The source of raw rows, and the output of records."""

    input_file: str | None = option(None, f"{', '.join(FORMATS)}; or name a `dataset`", metavar="FILE", path=True)
    dataset: str | None = option(
        None, "data set of the hub, or folder of one; NAME:SUBSET:SPLIT as in training", metavar="NAME", path="or name"
    )
    subset: str | None = option(None, "configuration of the data set, where it has several", metavar="NAME")
    split: str | None = option(None, "train, test ...; needed where there are several", metavar="NAME")
    bad_records: Literal["error", "skip"] = option("error", "rows that are not valid; skip: count and skip them")
    output_file: str = option(help="JSON lines with 'messages'", metavar="FILE", path=True, group="output")
    max_examples: int | None = option(None, "maximum number of records (all)", allowed=FROM_ONE, group="output")
    test_file: str | None = option(
        None,
        "held-out test records, `test_size` of them; no question of this file is in `output_file`",
        metavar="FILE",
        path=True,
        group="output",
    )
    test_size: int | None = option(
        None, "number of records of `test_file`, drawn at random", allowed=FROM_ONE, group="output"
    )
    seed: int = option(0, "the same seed draws the same test records", group="output", only_with="test_file")
    overwrite: bool = option(False, "replace existing files", group="output")


def prepare_rows(settings: SourceSettings, convert: Convert, expected: str) -> None:
    """Convert the rows of a source, write the records, and print how many were read, kept and dropped, and why.

    Args:
        settings: the source and the file of the records.
        convert: makes a record of a row.
        expected: the fields that ``convert`` reads, for the error of a source without a usable row.

    Raises:
        UserError: the source can't be read, gives no record, or is the output file.
    """
    if (settings.input_file is None) == (settings.dataset is None):
        raise UserError("name the source with either `input_file` or `dataset`")
    check_effects(vars(settings), SourceSettings)
    if settings.input_file is not None and Path(settings.input_file).is_dir():
        raise UserError("is a folder; name it as `dataset`, or a file in it", path=settings.input_file)
    name, subset, split = _source(settings)
    bad = BadRecords(settings.bad_records, settings=("bad_records", "columns"))
    rows = read_rows(name, split=split, subset=subset, bad=bad)
    targets = _check_targets(settings.output_file, settings.test_file, settings.test_size, settings.overwrite, name)
    records, counts = convert_rows(rows, convert, path=name, limit=settings.max_examples, bad=bad)
    reasons = counts.dropped.most_common()
    if not records:
        causes = [f"{reason}: {count}" for reason, count in reasons] + ([bad.describe()] if bad.count else [])
        names = f"; expected {expected}; there is {', '.join(counts.columns[:MOST_NAMES])}" if counts.columns else ""
        hint = "" if counts.dropped and all(reason.startswith(OF_RESPONSES) for reason in counts.dropped) else names
        raise UserError(f"no record could be kept ({'; '.join(causes) or 'it is empty'}){hint}", path=name)
    parts: Sequence[list[JsonObject]] = [records]
    if settings.test_size is not None:
        parts = hold_out(records, settings.test_size, settings.seed, name)
        if len(parts[1]) < settings.test_size:
            note(
                f"{len(parts[1])} test records, not {settings.test_size}: records with the same question stay together"
            )
    bad.tell()
    if counts.unused:
        note(f"not used: {named(counts.unused)}")
    for reason, lines in counts.dropped_lines.items():
        more = ", ..." if counts.dropped[reason] > len(lines) else ""
        note(f"dropped, {reason}: line {', '.join(map(str, lines))}{more}")
    for change, number in counts.changed.items():
        note(f"in {counted(number, 'record')} {change}")
    numbers = [("read", counts.read), ("kept", len(records)), ("dropped", counts.dropped.total()), *reasons]
    numbers += [("bad, skipped", bad.count)] if bad.count else []
    print_rows([(label, str(count)) for label, count in numbers])
    _write_files(dict(zip(targets, parts, strict=True)), overwrite=settings.overwrite)


def _source(settings: SourceSettings) -> tuple[str, str | None, str | None]:
    """Return the file, or the data set with subset and split, which may be named as in training: NAME:SUBSET:SPLIT."""
    if settings.dataset is None:
        return str(existing_file(str(settings.input_file), "raw file")), settings.subset, settings.split
    name, *named = parts_of_name(settings.dataset)
    flags = (settings.subset, settings.split)
    for setting, in_name, flag in zip(("subset", "split"), named, flags, strict=True):
        if in_name is not None and flag is not None:
            raise UserError(f"`dataset` names a {setting} already, '{in_name}'; leave `{setting}` out")
    subset, split = (in_name or flag for in_name, flag in zip(named, flags, strict=True))
    return name, subset, split


def _check_targets(
    output_file: str, test_file: str | None, test_size: int | None, overwrite: bool, source: str | None = None
) -> list[Path]:
    """Return the files to write; raise ``UserError`` if one exists, is the source, or is named twice."""
    if (test_size is None) != (test_file is None):
        raise UserError("give both `test_size` and `test_file`, or neither")
    targets = {"output_file": Path(output_file)} | ({} if test_file is None else {"test_file": Path(test_file)})
    for field, target in targets.items():
        if source is not None and target.exists() and Path(source).exists() and target.samefile(source):
            raise UserError(f"is both input and output; name another `{field}`", path=target)
        check_output_file(target, overwrite)
    if len({target.resolve() for target in targets.values()}) < len(targets):
        raise UserError("is both `output_file` and `test_file`; name another", path=output_file)
    return list(targets.values())


@dataclass(kw_only=True)
class GeneratorSettings:
    """Settings of both generators."""

    overwrite: bool = option(False, "replace existing files")
    seed: int = option(0, "the same seed gives the same files")


@dataclass(kw_only=True)
class StepmathSettings(GeneratorSettings):
    """Number of problems, and where they are written."""

    output_dir: str = option(help="folder of train.jsonl and test.jsonl", metavar="DIR", path=True)
    train_size: int = option(8000, "number of records of train.jsonl", allowed=FROM_ONE)
    test_size: int = option(500, "number of records of test.jsonl", allowed=FROM_ONE)


def prepare_stepmath(settings: StepmathSettings, difficulty: stepmath.Difficulty) -> None:
    """Generate word problems and write them to ``train.jsonl`` and ``test.jsonl``."""
    names = [Path(settings.output_dir, f"{part}.jsonl") for part in ("train", "test")]
    targets = [check_output_file(name, settings.overwrite) for name in names]
    parts = stepmath.generate_split(settings.train_size, settings.test_size, settings.seed, difficulty)
    _write_files(dict(zip(targets, parts, strict=True)), overwrite=settings.overwrite)


@dataclass(kw_only=True)
class NlRxSettings(GeneratorSettings):
    """Number of pairs, and where they are written."""

    output_file: str = option(help="JSON lines with 'messages'", metavar="FILE", path=True)
    test_file: str | None = option(None, "file of further records, to test with", metavar="FILE", path=True)
    size: int = option(10_000, "number of records", allowed=FROM_ONE)
    test_size: int | None = option(None, "number of records of `test_file`", allowed=FROM_ONE)


def prepare_nl_rx(settings: NlRxSettings) -> None:
    """Generate sentences with regular expressions and write them as chats."""
    targets = _check_targets(settings.output_file, settings.test_file, settings.test_size, settings.overwrite)
    parts = nl_rx_grammar.generate_split(settings.size, settings.test_size or 0, settings.seed)
    records = ([chat_record(NlRxTask.system_prompt, *pair) for pair in part] for part in parts)
    _write_files(dict(zip(targets, records, strict=False)), overwrite=settings.overwrite)


def _write_files(files: Mapping[Path, Sequence[Mapping[str, object]]], *, overwrite: bool) -> None:
    """Write JSON Lines files atomically as a group: none gets its final name before all are written."""
    with ExitStack() as stack:
        for target, records in files.items():
            stack.enter_context(claimed_output(target, overwrite))
            stream = stack.enter_context(atomic_write(target))
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            stream.flush()  # a full disk raises here, before any file has its final name
    for target, records in files.items():
        print(f"written: {target} ({counted(len(records), 'record')})")
