"""Read records from files of five formats, folders and data sets of the hub, and mix several of them."""

import codecs
import csv
import io
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import existing_file, read_jsonl, read_text
from stepjepa.base.json_object import JsonObject, RepeatedKey, json_fault, parse_marked
from stepjepa.data.columns import ASSISTANT, CHATS, SYSTEM, USER, Columns
from stepjepa.data.messages import TOOLS, is_absent, without_fillers
from stepjepa.data.records import BadRecords, Record, parse_record

Rows = Iterator[tuple[int, JsonObject]]
"""Pairs of line or row number, from 1, and row (column name -> value)."""

Wrong = Callable[[UserError, int], None]
"""Takes the error of a row and its number: ``BadRecords.note``."""

# Reasoning traces can be longer than the 128 KiB that the csv module allows a field.
_LONGEST_FIELD = 2**27


def read_rows(
    source: str | os.PathLike[str],
    *,
    split: str | None = None,
    subset: str | None = None,
    bad: BadRecords | None = None,
) -> Rows:
    """Read the rows of a file, of a folder that ``datasets`` can load, or of a data set on the hub.

    The suffix of a file decides its format (:data:`FORMATS`). A path is never looked up on the hub.
    ``split`` and ``subset`` are for folders and the hub, which may have several.
    """
    path, name = Path(source).expanduser(), os.fspath(source)
    if path.is_dir() or not (path.exists() or _looks_like_a_path(name)):
        return _read_dataset(str(path) if path.is_dir() else name, split, subset, (bad or BadRecords()).note)
    if split is not None or subset is not None:
        raise UserError(f"`{'subset' if split is None else 'split'}` does nothing with a file; leave it out", path=path)
    file = existing_file(path, "raw file")
    if file.suffix.lower() not in FORMATS:
        raise UserError(f"a name that ends in {', '.join(FORMATS)} is expected; convert it", path=file)
    return FORMATS[file.suffix.lower()](file, (bad or BadRecords()).note)


def read_records(
    path: str | os.PathLike[str],
    *,
    bad: BadRecords | None = None,
    columns: Columns = None,
    limit: int | None = None,
) -> list[Record]:
    """Read the records of a file, at least one: a table of :data:`FORMATS`, otherwise JSON lines.

    Args:
        path: the file.
        bad: collects invalid lines; None raises an error for the first of them.
        columns: names of the columns of the user's and the assistant's message; None recognises them.
        limit: read only so many records from the start; None for all.
    """
    return list(islice(each_record(path, bad=bad, columns=columns), limit))


def each_record(
    path: str | os.PathLike[str], *, bad: BadRecords | None = None, columns: Columns = None
) -> Iterator[Record]:
    """:func:`read_records` one by one."""
    if Path(path).is_dir():
        raise UserError("is a folder; name a file in it, or train on the folder as `dataset`", path=path)
    file, bad = existing_file(path, "data file"), bad or BadRecords()
    reader = FORMATS.get(file.suffix.lower(), _read_unnamed)
    number = 0
    for number, record in enumerate(_parse_each(reader(file, bad.note), path, bad, columns), start=1):  # noqa: B007  # counts them
        yield record
    if not number:
        remedy = bad.describe() if bad.count else "add at least one"
        raise UserError(f"holds no records; {remedy}", path=path)


def check_source(source: str | os.PathLike[str]) -> None:
    """Raise ``UserError`` if a source of records is a path and nothing is there, before others are read."""
    path = Path(source).expanduser()
    if _looks_like_a_path(os.fspath(source)) and not path.is_dir():
        existing_file(path, "data file")


def each_of_any(
    source: str | os.PathLike[str], *, bad: BadRecords | None = None, columns: Columns = None
) -> Iterator[Record]:
    """Yield the records of a file, of a folder that ``datasets`` can load, or of a data set on the hub.

    Subset and split may follow the name of a data set: ``openai/gsm8k:main:train``. See :func:`read_records`.
    """
    path, name = Path(source).expanduser(), os.fspath(source)
    if path.is_file() or (_looks_like_a_path(name) and not path.is_dir()):
        yield from each_record(path, bad=bad, columns=columns)
        return
    dataset, subset, split, *rest = (name, "", "") if path.is_dir() else (*name.split(":"), "", "")
    if any(rest):
        raise UserError(f"'{name}': expected NAME:SUBSET:SPLIT, got {name.count(':') + 1} parts")
    part, number = _choose_split(dataset, split or None, subset or None), 0
    if isinstance(part, _Files):
        for file in part.files:
            yield from each_record(file, bad=bad, columns=columns)
        return
    rows = enumerate(map(_row_without_fillers, part), start=1)
    for number, record in enumerate(_parse_each(rows, name, bad or BadRecords(), columns), start=1):  # noqa: B007  # counts them
        yield record
    if not number:
        raise UserError("holds no records; name another subset or split", path=name)


def mix(sizes: Sequence[int], weights: Sequence[float] | None, seed: int) -> list[list[int]]:
    """Draw the largest mixture of several data sets with these relative sizes and no repetition.

    Args:
        sizes: number of records of each.
        weights: relative; None takes all records.
        seed: of what is drawn.

    Returns:
        For each data set the indices of the records that are taken, in order.
    """
    if weights is None:
        return [list(range(size)) for size in sizes]
    if len(weights) != len(sizes) or not all(0 < weight < float("inf") for weight in weights):
        raise UserError(f"dataset_weights: expected {len(sizes)} positive numbers, one for each `dataset`")
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    draw, indices = random.Random(seed), list[list[int]]()
    for size, weight in zip(sizes, weights, strict=True):
        indices.append(sorted(draw.sample(range(size), min(round(scale * weight), size))))
    if not all(indices):
        raise UserError(f"dataset_weights: no record of data set {indices.index([]) + 1} is taken; raise its weight")
    return indices


def _parse_each(rows: Rows, path: str | os.PathLike[str], bad: BadRecords, columns: Columns) -> Iterator[Record]:
    for line, value in rows:
        try:
            record = parse_record(value, path, line, columns)
        except UserError as error:
            bad.note(error, line)
        else:
            yield record


def _looks_like_a_path(name: str) -> bool:
    # The hub's names have one slash at most and no such endings.
    is_file = Path(name).suffix.lower() in FORMATS
    return is_file or name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1


def _read_json(path: Path, wrong: Wrong) -> Rows:
    """Read JSON lines; or a list of objects, objects over several lines, an object with a list (:data:`_LISTS`)."""
    with path.open("rb") as stream:
        lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in stream)
        first = next(filter(None, lines), b"{}")
    try:
        value = json.loads(first)
        by_line = not (isinstance(value, list) or (isinstance(value, dict) and _is_wrapped(value)))
    except (ValueError, RecursionError):  # also a number of thousands of digits
        by_line = not first.startswith((b"[", b"{"))
    values = [] if by_line else _json_values(path)
    if not values:
        yield from read_jsonl(path, wrong=lambda error: wrong(error, error.line or 0))
        return
    in_list = len(values) == 1
    if in_list:
        values = list(enumerate(_rows_of(values[0][1], path), start=1))
    for number, row in values:
        if isinstance(row, dict | RepeatedKey):
            fault = json_fault(row)
        else:
            fault = f"is {shown(row)}; expected an object with the fields of a record"
            if isinstance(row, list):
                fault += ", so write a chat as {'messages': [...]}"
        if fault is None:
            yield number, row  # type: ignore[misc]  # an object
        else:
            error = UserError(f"element {number} {fault}", path=path) if in_list else None
            wrong(error or UserError(fault, path=path, line=number), number)


def _read_unnamed(path: Path, wrong: Wrong) -> Rows:
    """Read a file whose name says no format: JSON."""
    with path.open("rb") as stream:
        first = next(filter(None, (line.removeprefix(codecs.BOM_UTF8).strip() for line in stream)), b"{")
    if not first.startswith((b"{", b"[")):
        fault = f"holds no JSON, and its name ends in none of {', '.join(FORMATS)}"
        raise UserError(f"{fault}; unpack or convert it, and name it after its format", path=path)
    yield from _read_json(path, wrong)


def _json_values(path: Path) -> list[tuple[int, object]]:
    """Return the concatenated JSON values of a file, each with its first line; an empty list if it is not JSON."""
    text, end, line = read_text(path), 0, 1
    values = list[tuple[int, object]]()
    blank = re.compile(r"[\s\ufeff]*")  # a byte order mark, too, as files that were put together have
    try:
        while (start := end + len(blank.match(text, end)[0])) < len(text):  # type: ignore[index]  # always matches
            line += text.count("\n", end, start)
            value, end = parse_marked(text, start)
            values.append((line, value))
            line += text.count("\n", start, end)
    except (ValueError, RecursionError) as error:
        if path.suffix.lower() == ".json" and text.lstrip("\ufeff \t\r\n").startswith("["):
            fault = f"not valid JSON ({_first_line(error)})"
            raise UserError(fault, path=path, line=getattr(error, "lineno", None)) from None
        return []
    return values


_COLUMNS = (*CHATS, *USER, *ASSISTANT)
# Keys under which files of one object hold their rows.
_LISTS = (
    "data",
    "train",
    "rows",
    "records",
    "examples",
    "items",
    "instances",
    "samples",
    "dataset",
    "test",
    "validation",
)


def _is_wrapped(value: JsonObject) -> bool:
    """Return whether an object holds rows instead of being one: under a key, or as a table by its columns."""
    if any(name in value and not isinstance(value[name], list | dict) for name in _COLUMNS) or CHATS[0] in value:
        return False
    return (
        any(isinstance(value.get(name), list) for name in _LISTS)
        or _by_columns(value, dict)
        or _by_columns(value, list)
    )


def _by_columns(value: JsonObject, kind: type) -> bool:
    """Return whether an object is a table: its columns are lists without objects, or objects of the same keys."""
    parts = list(value.values())
    if len(parts) < 2 or not all(isinstance(part, kind) for part in parts):
        return False
    if kind is dict:
        return all(part.keys() == parts[0].keys() for part in parts)
    return all(len(part) == len(parts[0]) and not any(isinstance(cell, dict) for cell in part) for part in parts)


def _rows_of(value: object, path: Path) -> list[object]:
    """Return the rows of a file of one JSON value; UserError if it has several lists, or is a table of pandas."""
    if not isinstance(value, dict) or not _is_wrapped(value):
        return value if isinstance(value, list) else [value]
    rows = {name: value[name] for name in _LISTS if isinstance(value.get(name), list)}
    if not rows and _by_columns(value, list):
        return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not rows or ("columns" in value and "index" in value):
        fault = "a table as pandas writes it; write it with to_json(FILE, orient='records', lines=True)"
        raise UserError(fault, path=path)
    if len(rows) > 1:
        fault = f"an object with lists under {', '.join(rows)}; write the one that is meant to a file of its own"
        raise UserError(fault, path=path)
    if shared := [name for name in (*SYSTEM, *TOOLS) if not is_absent(value.get(name))]:
        raise UserError(f"'{shared[0]}' stands beside the list of records; write it into each of them", path=path)
    return list(*rows.values())


def _read_tsv(path: Path, wrong: Wrong) -> Rows:
    """Read one row per line; quotation marks are text unless they enclose a whole field."""
    for line, row in _read_table(path, wrong, delimiter="\t", quoting=csv.QUOTE_NONE):
        yield line, {name: _unquoted(field) for name, field in row.items()}


def _unquoted(field: str) -> str:
    return field[1:-1].replace('""', '"') if re.fullmatch(r'"(?:[^"]|"")*"', field) else field


def _read_table(path: Path, wrong: Wrong, **dialect: Any) -> Rows:
    names: list[str] | None = None
    line = 1
    csv.field_size_limit(_LONGEST_FIELD)
    text = read_text(path)
    if dialect.get("delimiter") == ",":
        dialect["delimiter"] = _delimiter(text)
    table = csv.reader(io.StringIO(text, newline=""), **dialect)
    try:
        for row in table:
            if not row:
                pass
            elif names is None:
                names = [_unquoted(name.strip()) for name in row]
                # pandas leaves the name of its index empty; a header without names, or with one twice, is none.
                if not any(names) or len(set(names)) < len(names):
                    raise UserError("the first line must name the columns, each once", path=path, line=1)
            elif len(row) == len(names):
                yield line, dict(zip(names, row, strict=True))
            else:
                fault = f"{len(row)} fields where the header has {len(names)}; quote a field with a separator"
                wrong(UserError(fault, path=path, line=line), line)
            line = table.line_num + 1
    except csv.Error as error:
        raise UserError(f"not valid {path.suffix[1:].upper()} ({error})", path=path, line=line) from None


def _delimiter(text: str) -> str:
    """Return the delimiter of a table: a semicolon, tab or bar if the header has it and no comma, as Excel writes."""
    header = text.lstrip("\r\n").partition("\n")[0]
    return next((mark for mark in ";\t|" if "," not in header and mark in header), ",")


def _read_parquet(path: Path, wrong: Wrong) -> Rows:
    # Imported here: it takes a fifth of a second.
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if (name := _repeated_field(file.schema_arrow)) is not None:
                raise UserError(f"has the column {shown(name)} twice; keep one of the two", path=path)
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from enumerate(map(_row_without_fillers, rows), start=1)
    except UserError:
        raise
    # Invalid text, and dates that Python can't represent, raise errors only when their row is read.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"no readable Parquet file ({_first_line(error)}); write it again", path=path) from None


def _repeated_field(fields: Iterable[Any]) -> str | None:
    """Return a name that two fields of an Arrow schema or struct have, of which a row would hold the last alone."""
    import pyarrow

    names = set[str]()
    for each in fields:
        is_struct = isinstance(each.type, pyarrow.StructType)
        inner = each.type if is_struct else [getattr(each.type, "value_field", None)]  # of a list
        name = each.name if each.name in names else _repeated_field(filter(None, inner))
        if name is not None:
            return str(name)
        names.add(each.name)
    return None


# Suffix of a file -> its reader.
FORMATS: dict[str, Callable[[Path, Wrong], Rows]] = {
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".json": _read_json,
    ".csv": partial(_read_table, delimiter=",", strict=True),
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}


def _read_dataset(name: str, split: str | None, subset: str | None, wrong: Wrong) -> Rows:
    part = _choose_split(name, split, subset)
    rows: Iterable[JsonObject]
    if isinstance(part, _Files):
        rows = (row for file in part.files for _, row in FORMATS[file.suffix.lower()](file, wrong))
    else:
        rows = map(_row_without_fillers, part)
    yield from enumerate(rows, start=1)


def _choose_split(name: str, split: str | None, subset: str | None) -> Any:
    """Return the rows of a split of a data set; or its files, where a folder has nothing else."""
    import datasets

    splits: Any
    saved = subset is None and any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        # All splits are fetched in any case; loading them together lets the error list them.
        if saved:
            splits = datasets.load_from_disk(name)
        else:
            splits = _plain_files(name, subset) or datasets.load_dataset(name, subset)
    except Exception as error:  # a data set, its files or the hub's library may raise anything
        fault = _first_line(error) + (f" ({_first_line(error.__cause__)})" if error.__cause__ else "")
        raise UserError(
            f"can't be loaded: {fault}; check name, subset and network, or pass a file", path=name
        ) from None
    if isinstance(splits, datasets.Dataset):  # saved alone, by its `save_to_disk`
        splits = {str(splits.split or "train"): splits}
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        fault = "name a split" if split is None else f"has no split '{split}'"
        raise UserError(f"{fault}; there are {', '.join(splits)}", path=name)
    return splits[split]


class _Files(NamedTuple):
    """The files of a split."""

    files: list[Path]


def _plain_files(name: str, subset: str | None) -> dict[str, _Files]:
    """Return the files of each split of a folder if all can be read here; empty for other data sets.

    ``datasets`` would guess the types of a table's columns: the text 007 of a CSV file becomes 7, or 7.0 beside a gap.
    A card may say how the files are to be read, so a folder with one is left to it.
    """
    import datasets

    if not Path(name).is_dir() or (Path(name) / "README.md").is_file():
        return {}
    parts = datasets.load_dataset_builder(name, subset).config.data_files or {}
    splits = {str(split): _Files([Path(str(file)) for file in files]) for split, files in parts.items()}
    files = [file for each in splits.values() for file in each.files]
    return splits if all(file.suffix.lower() in FORMATS and file.is_file() for file in files) else {}


def _row_without_fillers(row: JsonObject) -> JsonObject:
    """Return a row of an Arrow table with all its columns, without fillers in nested objects."""
    return {name: without_fillers(value) for name, value in row.items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .:")
