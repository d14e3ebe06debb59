"""Cells of tables: as they were put in, without what a table changes in them.

A table fills objects up with the fields of those in its other rows, as nulls, and numbers of few bits are widened to
other decimals: 3.8 becomes 3.799999952316284.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from stepjepa.base.json_object import JsonObject, RepeatedKeyError, parse_data

# Names of the types in NumPy, datasets, pandas' nullable columns, polars and Arrow -> number of bits.
_BITS = {"float16": 16, "Float16": 16, "halffloat": 16, "float32": 32, "Float32": 32, "float": 32}
_BITS |= {"halffloat[pyarrow]": 16, "float[pyarrow]": 32}


def with_own_objects(rows: Iterable[Mapping[str, Any]], table: Any) -> Iterator[JsonObject]:
    """Yield the rows of a ``table`` as :func:`own_objects`."""
    kinds = kinds_of_columns(table)
    return (own_objects(row, kinds) for row in rows)


def own_objects(row: Mapping[str, Any], kinds: Mapping[str, Any], filled: Collection[str] | None = None) -> JsonObject:
    """Return a row with its own values: objects without added nulls, numbers of few bits in their shortest decimals.

    A column of JSON has no added fields: a null in it is the user's own. In a file such a column holds texts, which are
    parsed.

    Args:
        row: column name -> value.
        kinds: of the columns, from :func:`kinds_of_columns`.
        filled: the columns whose objects the table has filled up with nulls; None for all.
    """
    return {
        name: _own(value, kinds.get(name), is_filled=filled is None or name in filled) for name, value in row.items()
    }


def kinds_of_columns(table: Any) -> Mapping[str, Any]:
    """Return the types of a table's columns, of others than tables none.

    Args:
        table: an Arrow schema, a ``datasets.Dataset``, or a table of pyarrow, pandas or polars.
    """
    if hasattr(table, "features"):
        # A stream may not know them, and those of a single column have no names.
        return table.features if isinstance(table.features, Mapping) else {}
    if hasattr(table, "dtypes") and hasattr(table.dtypes, "items"):  # pandas
        return dict(table.dtypes.items())
    schema: Any = getattr(table, "schema", None if isinstance(table, Mapping) else table)
    if hasattr(schema, "names") and hasattr(schema, "types"):  # Arrow's
        return dict(zip(schema.names, schema.types, strict=True))
    return schema if isinstance(schema, Mapping) else {}  # polars'


def filled_columns(frame: Any) -> set[str]:
    """Return the columns of a pandas frame whose objects Arrow has filled up with nulls, as after ``read_parquet``.

    There lists are arrays. Of objects by themselves it is not known: those that all have the same fields may be.
    """
    filled = set[str]()
    for name, kind in frame.dtypes.items():
        cells = [cell for cell in frame[name] if cell is not None] if str(kind) == "object" else []
        arrays = any(hasattr(cell, "dtype") and getattr(cell, "ndim", 0) for cell in cells[:1])
        fields = {frozenset(cell) if isinstance(cell, Mapping) else None for cell in cells}
        if arrays or "pyarrow" in str(kind) or (len(fields) == 1 and None not in fields):
            filled.add(str(name))
    return filled


def _own(value: Any, kind: Any, *, is_filled: bool) -> Any:
    """Return a value as :func:`own_objects`; ``kind`` is its type, if known."""
    if type(kind).__name__ == "Json":
        return value
    if getattr(kind, "extension_name", None) == "arrow.json":
        return _parsed(value)
    if isinstance(value, float):
        return _shortest(value, _BITS.get(str(getattr(kind, "dtype", kind))))
    if isinstance(value, Mapping):
        return {
            name: _own(item, _field(kind, name), is_filled=is_filled)
            for name, item in value.items()
            if not is_filled or item is not None
        }
    if isinstance(value, list):
        item_kind = kind[0] if isinstance(kind, list) else None
        for name in ("feature", "value_type", "inner"):  # of datasets, Arrow, polars
            item_kind = getattr(kind, name, item_kind)
        return [_own(item, item_kind, is_filled=is_filled) for item in value]
    return value


def _shortest(value: float, bits: int | None) -> float:
    """Return the shortest decimal that has the same value in so many bits; without them the value."""
    if bits is None:
        return value
    import numpy as np

    return float(str((np.float16 if bits == 16 else np.float32)(value)))


def _field(kind: Any, name: str) -> Any:
    """Return the type of a field of a struct, None if it is not known."""
    if isinstance(kind, Mapping):
        return kind.get(name)
    if not hasattr(kind, "get_field_index"):  # polars', or none
        return next((field.dtype for field in getattr(kind, "fields", None) or () if field.name == name), None)
    number = kind.get_field_index(name)
    return kind.field(number).type if number >= 0 else None


def _parsed(text: Any) -> Any:
    """Parse JSON; return what is none as it is, for the reader of the record to name it."""
    if not isinstance(text, str):
        return text
    try:
        return parse_data(text)
    except (RepeatedKeyError, ValueError, RecursionError):
        return text
