"""Raw data sets, read row by row: local files of five formats, and data sets of the hub."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepjepa.data.formats import Columns
from stepjepa.data.records import BadRecords, Record, parse_record
from stepjepa.errors import UserError, shown
from stepjepa.files import existing_file, holds_half, read_jsonl, read_text

Rows = Iterator[tuple[int, dict[str, Any]]]

# Reasoning traces can be longer than the 128 KiB that the csv module allows a field.
_LONGEST_FIELD = 2**27


def read_rows(
    source: str | os.PathLike[str],
    *,
    split: str | None = None,
    subset: str | None = None,
    bad: BadRecords | None = None,
) -> Rows:
    """The rows of a raw data set, each with its line or row number, counted from 1.

    Args:
        source: a file, its format told by its name (:data:`FORMATS`); a folder that ``datasets`` can load; or the name
            of a data set on the hub. What looks like a path is never asked for at the hub.
        split: of a hub data set or folder; may be left out where there is only one.
        subset: its configuration, where it has several.
        bad: takes the rows that are wrong; None makes the first of them an error.

    Raises:
        UserError: the source is missing or can't be read; a line is wrong, without ``bad``; or a split or subset does
            not exist, or was named for a file.
    """
    path = Path(source).expanduser()
    if path.is_dir() or not (path.exists() or _looks_like_a_path(os.fspath(source))):
        return _read_dataset(str(path) if path.is_dir() else os.fspath(source), split, subset)
    for name, value in (("split", split), ("subset", subset)):
        if value is not None:
            raise UserError(f"--{name} does nothing with a file; leave it out", path=path)
    found = existing_file(path, "raw file")
    suffix = found.suffix.lower()
    if suffix not in FORMATS:
        packed = suffix in (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar")
        remedy = "unpack it first" if packed else "rename or convert it"
        raise UserError(f"a name that ends in {', '.join(FORMATS)} is expected; {remedy}", path=found)
    return FORMATS[suffix](found, _raise if bad is None else bad.note)


def iterate_records(
    path: str | os.PathLike[str], bad: BadRecords | None = None, columns: Columns = None
) -> Iterator[Record]:
    """The records of a file, one after the other: JSON lines, or a table of :data:`FORMATS`.

    Args:
        path: of the file.
        bad: takes the lines that are wrong; None makes the first of them an error.
        columns: of the user's and the assistant's message, where they have names of their own.

    Raises:
        UserError: the file is missing, no text, or one of its lines is wrong.
    """
    return _parse_each(_rows(path, bad), path, bad, columns)


def _parse_each(rows: Rows, path: str | os.PathLike[str], bad: BadRecords | None, columns: Columns) -> Iterator[Record]:
    for line, value in rows:
        try:
            record = parse_record(value, path, line, columns)
        except UserError as error:
            if bad is None:
                raise
            bad.note(error)
        else:
            yield record


def describe_columns(record: Record) -> str | None:
    """The columns of its file that a record is made of, and the record; None where its file has ``messages``."""
    if record.columns == ("messages",):
        return None
    turns = [f"{message['role']} {shown(message['content'])}" for message in record.messages]
    return (
        f"{', '.join(record.columns)}; line {record.line} is {', '.join(turns[:3])}{' ...' if len(turns) > 3 else ''}"
    )


def _rows(path: str | os.PathLike[str], bad: BadRecords | None) -> Rows:
    kind = Path(path).suffix.lower()
    if Path(path).is_file() and (kind in _TABLES or (kind == ".json" and _is_list(Path(path)))):
        return read_rows(path, bad=bad)
    return read_jsonl(path, "data file", finite=True, **({} if bad is None else {"wrong": bad.note}))


_TABLES = (".csv", ".tsv", ".parquet")


def _is_list(path: Path) -> bool:
    """Whether a file is a list as a whole, as ``json.dump`` and chat tools write them."""
    with path.open("rb") as stream:
        return stream.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def read_records(
    path: str | os.PathLike[str], *, bad: BadRecords | None = None, columns: Columns = None
) -> list[Record]:
    """All records of a file; the arguments are those of :func:`iterate_records`.

    Raises:
        UserError: the file is missing, no text, or holds no sound record; without ``bad`` also: a line is wrong.
    """
    records = list(iterate_records(path, bad, columns))
    if not records:
        if bad is not None and bad.count:
            raise UserError(f"holds no sound record; {bad.describe()}", path=Path(path))
        raise UserError("holds no records; expected one JSON object per line", path=Path(path))
    return records


def read_any(source: str | os.PathLike[str], *, bad: BadRecords | None = None, columns: Columns = None) -> list[Record]:
    """The records of a file, of a folder that ``datasets`` can load, or of a data set on the hub.

    Args:
        source: the name of a data set may go on with subset and split: ``openai/gsm8k:main:train``.
        bad: see :func:`iterate_records`.
        columns: see there.

    Raises:
        UserError: the source is missing or can't be read, or a record is wrong.
    """
    path, name = Path(source).expanduser(), os.fspath(source)
    if path.is_file() or not (path.is_dir() or not _looks_like_a_path(name)):
        return read_records(path, bad=bad, columns=columns)
    dataset, subset, split = (*name.split(":"), "", "")[:3] if not path.is_dir() else (name, "", "")
    rows = read_rows(dataset, subset=subset or None, split=split or None)
    return list(_parse_each(rows, name, bad, columns))


def _looks_like_a_path(name: str) -> bool:
    # The hub's names have one slash at most and no such endings.
    is_file = Path(name).suffix.lower() in FORMATS
    return is_file or name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1


Wrong = Callable[[UserError, int], None]
"""Takes what is wrong with a row, and its number."""


def _raise(error: UserError, line: int) -> None:
    raise error


def _read_json_lines(path: Path, wrong: Wrong) -> Rows:
    return read_jsonl(path, "raw file", wrong=lambda error: wrong(error, error.line or 0))


def _read_json(path: Path, wrong: Wrong) -> Rows:
    """A list of objects, or JSON lines."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            # One object after another: JSON lines by another name.
            yield from _read_json_lines(path, wrong)
            return
        raise UserError(f"not valid JSON ({error.msg} at column {error.colno})", path=path, line=error.lineno) from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, brackets in thousands of brackets.
        raise UserError(f"can't be read as JSON ({_first_line(error)})", path=path) from None
    if not isinstance(value, list):
        raise UserError("expected a list of objects", path=path)
    for number, row in enumerate(value, start=1):
        if isinstance(row, dict) and not holds_half(row):
            yield number, row
        else:
            half = "holds half of a character (a lone surrogate); remove it"
            fault = half if isinstance(row, dict) else f"is a JSON {type(row).__name__}, expected an object"
            wrong(UserError(f"element {number} {fault}", path=path), number)


def _read_csv(path: Path, wrong: Wrong) -> Rows:
    return _read_table(path, wrong, {"delimiter": ",", "strict": True})


def _read_tsv(path: Path, wrong: Wrong) -> Rows:
    """Tab-separated values come in two kinds: quoted like CSV, or plain, a line a row, quotation marks being text."""
    with path.open("rb") as lines:
        tabs = {line.count(b"\t") for line in lines if line.strip()}
    if len(tabs) > 1:
        # Some row must go over several lines, or hold a tab, in quotation marks.
        return _read_table(path, wrong, {"delimiter": "\t", "strict": True})
    return _read_table(path, wrong, {"delimiter": "\t", "quoting": csv.QUOTE_NONE}, unquote=True)


_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def _unquoted(field: str) -> str:
    return field[1:-1].replace('""', '"') if _QUOTED.fullmatch(field) else field


def _read_table(path: Path, wrong: Wrong, dialect: dict[str, Any], *, unquote: bool = False) -> Rows:
    names: list[str] | None = None
    before = csv.field_size_limit(_LONGEST_FIELD)
    line = 1
    try:
        # utf-8-sig: spreadsheets put a byte order mark in front.
        with path.open(encoding="utf-8-sig", newline="") as stream:
            table = csv.reader(stream, **dialect)
            for fields in table:
                if fields:
                    row = [_unquoted(field) for field in fields] if unquote else fields
                    if names is None:
                        names = _header(row, path)
                    elif len(row) == len(names):
                        yield line, dict(zip(names, row, strict=True))
                    else:
                        told = f"{len(row)} fields where the header has {len(names)}; quote a field with a separator"
                        wrong(UserError(told, path=path, line=line), line)
                line = table.line_num + 1
    except csv.Error as error:
        raise UserError(f"not valid {path.suffix[1:].upper()} ({error})", path=path, line=line) from None
    except UnicodeDecodeError:
        # A decoder reads ahead and can't tell the line that is wrong; this does, and raises.
        read_text(path)
        raise
    finally:
        csv.field_size_limit(before)


def _header(names: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in names]
    # pandas leaves the name of its index empty; a header without names, or with one twice, is none.
    if not any(names) or len(set(names)) < len(names):
        raise UserError("the first line must name the columns, each once", path=path, line=1)
    return names


def _read_parquet(path: Path, wrong: Wrong) -> Rows:
    # Imported here: it takes a fifth of a second.
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from enumerate((row for batch in file.iter_batches() for row in batch.to_pylist()), start=1)
    # Text that is none, and dates that Python does not have, are found out row by row.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"no readable Parquet file ({_first_line(error)}); write it again", path=path) from None


# By the end of a file's name.
FORMATS = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}


def _read_dataset(name: str, split: str | None, subset: str | None) -> Rows:
    import datasets

    try:
        # All splits are fetched in any case; asked for together, they can be named where a wrong one is wanted.
        splits = datasets.load_dataset(name, subset)
    except ConnectionError as error:
        remedy = "check the network, or download a file and pass it as --input_file"
        raise UserError(f"can't reach the hub ({_first_line(error)}); {remedy}", path=name) from None
    except FileNotFoundError as error:
        raise UserError(f"{_first_line(error)}; check --dataset", path=name) from None
    except Exception as error:  # whatever else a data set, its files or the hub's library may come up with
        cause = f" ({_first_line(error.__cause__)})" if error.__cause__ else ""
        message = _first_line(error) + cause
        remedy = "; see --subset" if "config" in message.lower() else ""
        raise UserError(f"can't be loaded: {message}{remedy}", path=name) from None
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        wrong = "has several splits; pass --split with one of" if split is None else f"has no split '{split}'; it has"
        raise UserError(f"{wrong} {', '.join(splits)}", path=name)
    yield from enumerate(splits[split], start=1)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .:")
