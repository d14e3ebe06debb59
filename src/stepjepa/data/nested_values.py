"""Objects in cells of tables: as they were put in, without the nulls that a table fills them up with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stepjepa.base.json_object import JsonObject, RepeatedKeyError, parse_data


def with_own_objects(rows: Iterable[Mapping[str, Any]], table: Any) -> Iterator[JsonObject]:
    """Yield the rows of a ``table`` as :func:`own_objects`."""
    kinds = kinds_of_columns(table)
    return (own_objects(row, kinds) for row in rows)


def own_objects(row: Mapping[str, Any], kinds: Mapping[str, Any]) -> JsonObject:
    """Return a row whose objects have its own fields alone: an Arrow table adds those of all other rows as null.

    A column of JSON has no such fields: a null in it is the user's own. In a file such a column holds texts, which are
    parsed.

    Args:
        row: column name -> value.
        kinds: of the columns, from :func:`kinds_of_columns`.
    """
    return {name: _own(value, kinds.get(name)) for name, value in row.items()}


def kinds_of_columns(table: Any) -> Mapping[str, Any]:
    """Return the features or the Arrow types of a table's columns.

    Args:
        table: an Arrow schema or table, or a ``datasets.Dataset``; of others nothing is known, and every null in an
            object is taken for one that the table has added.
    """
    if hasattr(table, "features"):
        # A stream may not know them, and those of a single column have no names.
        return table.features if isinstance(table.features, Mapping) else {}
    schema = getattr(table, "schema", table)
    if hasattr(schema, "names") and hasattr(schema, "types"):
        return dict(zip(schema.names, schema.types, strict=True))
    return {}


def _own(value: Any, kind: Any) -> Any:
    """Return a value without the nulls that a table has added; ``kind`` is its feature or Arrow type, if known."""
    if type(kind).__name__ == "Json":
        return value
    if getattr(kind, "extension_name", None) == "arrow.json":
        return _parsed(value)
    if isinstance(value, Mapping):
        return {name: _own(item, _field(kind, name)) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        item_kind = kind[0] if isinstance(kind, list) else getattr(kind, "feature", getattr(kind, "value_type", None))
        return [_own(item, item_kind) for item in value]
    return value


def _field(kind: Any, name: str) -> Any:
    """Return the feature or Arrow type of a field of a struct, None if it is not known."""
    if isinstance(kind, Mapping):
        return kind.get(name)
    number = kind.get_field_index(name) if hasattr(kind, "get_field_index") else -1
    return kind.field(number).type if number >= 0 else None


def _parsed(text: Any) -> Any:
    """Parse JSON; return what is none as it is, for the reader of the record to name it."""
    if not isinstance(text, str):
        return text
    try:
        return parse_data(text)
    except (RepeatedKeyError, ValueError, RecursionError):
        return text
