"""Read the rows of files: JSON, JSON lines, CSV, TSV, Parquet and Arrow."""

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import read_jsonl, read_text
from stepjepa.base.json_object import JsonObject, RepeatedKey, json_fault, parse_marked
from stepjepa.data.columns import ASSISTANT, CHATS, SYSTEM, USER
from stepjepa.data.messages import TOOLS, is_absent
from stepjepa.data.nested_values import with_own_objects

Rows = Iterator[tuple[int, JsonObject]]
"""Pairs of line or row number, from 1, and row (column name -> value)."""

OnError = Callable[[UserError, int], None]
"""Function that takes the error of a row and its number, such as ``BadRecords.handle``; the row is then skipped."""

# Reasoning traces can be longer than the 128 KiB that the csv module allows a field.
_LONGEST_FIELD = 2**27


def _read_json(path: Path, on_error: OnError) -> Rows:
    """Read JSON lines; or a list of objects, objects over several lines, an object with a list (:data:`_LISTS`)."""
    values = [] if _is_by_line(_first_filled_line(path)) else _json_values(path)
    if not values:
        yield from read_jsonl(path, on_error=lambda error: on_error(error, error.line or 0))
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
            on_error(error or UserError(fault, path=path, line=number), number)


def read_unnamed(path: Path, on_error: OnError) -> Rows:
    """Read a file whose name says no format: JSON."""
    if not _first_filled_line(path).startswith((b"{", b"[")):
        fault = f"holds no JSON, and its name ends in none of {', '.join(FORMATS)}"
        raise UserError(f"{fault}; unpack or convert it, and name it after its format", path=path)
    yield from _read_json(path, on_error)


def _first_filled_line(path: Path) -> bytes:
    """Return the first line of a file that is not blank, without white space around it; ``{}`` if there is none."""
    with path.open("rb") as stream:
        return next(filter(None, (line.removeprefix(codecs.BOM_UTF8).strip() for line in stream)), b"{}")


def _is_by_line(first: bytes) -> bool:
    """Return whether a file of JSON with this first line has one row a line, or is to be read line by line anyway."""
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):  # also a number of thousands of digits
        return not first.startswith((b"[", b"{"))
    return not (isinstance(value, list) or (isinstance(value, dict) and _is_wrapped(value)))


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
            fault = f"not valid JSON ({first_line(error)})"
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
        raise UserError(
            f"'{shared[0]}' is beside the list of records, where it is not read; write it into each record", path=path
        )
    return list(*rows.values())


def _read_tsv(path: Path, on_error: OnError) -> Rows:
    """Read one row per line; quotation marks are text unless they enclose a whole field.

    A field in them may have tabs and line ends, as pandas and Excel write it, if the whole file is quoted so.
    """
    text = read_text(path)
    if _has_open_field(text) and _is_quoted(text):
        yield from _read_table(path, text, on_error, delimiter="\t")
        return
    for line, row in _read_table(path, text, on_error, delimiter="\t", quoting=csv.QUOTE_NONE):
        yield line, {name: _unquoted(field) for name, field in row.items()}


def _read_csv(path: Path, on_error: OnError) -> Rows:
    """Read a table whose delimiter is a comma, or what its header has in place of one."""
    text, mark = read_text(path), None
    if excel := re.match(r"sep=(.)\r?\n", text):
        # The line by which Excel learns the delimiter is blank for the reader, so that rows keep their numbers.
        text, mark = text[excel.end(1) :], excel[1]
    yield from _read_table(path, text, on_error, delimiter=mark or _delimiter(text), strict=True)


# A field that opens with a quotation mark and does not close in its line.
_OPEN_FIELD = re.compile(r'(?:^|\t)"(?!(?:[^"\t\n]|"")*"(?:\t|\r?$))', re.MULTILINE)


def _has_open_field(text: str) -> bool:
    return _OPEN_FIELD.search(text) is not None


def _is_quoted(text: str) -> bool:
    """Return whether a TSV is one in which quotation marks enclose fields: all its rows then have as many fields."""
    csv.field_size_limit(_LONGEST_FIELD)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    try:
        return len({len(row) for row in rows if row}) == 1
    except csv.Error:
        return False


def _unquoted(field: str) -> str:
    return field[1:-1].replace('""', '"') if re.fullmatch(r'"(?:[^"]|"")*"', field) else field


def _read_table(path: Path, text: str, on_error: OnError, **dialect: Any) -> Rows:
    names: list[str] | None = None
    line = 1
    csv.field_size_limit(_LONGEST_FIELD)
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
                fault = f"{counted(len(row), 'field')} where the header has {len(names)}"
                remedy = "quote a field with a separator, and double quotation marks inside it"
                on_error(UserError(f"{fault}; {remedy}", path=path, line=line), line)
            line = table.line_num + 1
    except csv.Error as error:
        raise UserError(f"not valid {path.suffix[1:].upper()} ({error})", path=path, line=line) from None


def _delimiter(text: str) -> str:
    """Return the delimiter of a table: a semicolon, tab or bar if the header has it and no comma, as Excel writes."""
    header = text.lstrip("\r\n").partition("\n")[0]
    return next((mark for mark in ";\t|" if "," not in header and mark in header), ",")


def _read_parquet(path: Path, on_error: OnError) -> Rows:
    # Imported here: it takes a fifth of a second.
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from _rows_of_batches(file.iter_batches(), file.schema_arrow, path)
    except UserError:
        raise
    # Invalid text, and dates that Python can't represent, raise errors only when their row is read.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"no readable Parquet file ({first_line(error)}); write it again", path=path) from None


def _read_arrow(path: Path, on_error: OnError) -> Rows:
    """Read Arrow's file format, which Feather is, or its stream, which ``Dataset.save_to_disk`` writes."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                source.seek(0)
                batches = reader = pyarrow.ipc.open_stream(source)
            yield from _rows_of_batches(batches, reader.schema, path)
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"no readable Arrow file ({first_line(error)}); write it again", path=path) from None


def _rows_of_batches(batches: Iterable[Any], schema: Any, path: Path) -> Rows:
    """Yield the numbered rows of record batches; raise ``UserError`` if two columns have one name."""
    if (name := _repeated_field(schema)) is not None:
        raise UserError(f"has the column {shown(name)} twice; keep one of the two", path=path)
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from enumerate(with_own_objects(rows, schema), start=1)


def _repeated_field(fields: Iterable[Any]) -> str | None:
    """Return a name that two fields of an Arrow schema or struct share, so that a row would hold only the second."""
    import pyarrow

    names = set[str]()
    for arrow_field in fields:
        is_struct = isinstance(arrow_field.type, pyarrow.StructType)
        inner = arrow_field.type if is_struct else [getattr(arrow_field.type, "value_field", None)]  # of a list
        name = arrow_field.name if arrow_field.name in names else _repeated_field(filter(None, inner))
        if name is not None:
            return str(name)
        names.add(arrow_field.name)
    return None


# Suffix of a file -> its reader.
FORMATS: dict[str, Callable[[Path, OnError], Rows]] = {
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class; without a full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .:")
