"""Numbers of table columns with 16 or 32 bits, which Python widens to other decimals: 3.8 becomes 3.799999952316284."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# Names of the types in NumPy, datasets, pandas' nullable columns, polars and Arrow -> number of bits.
_BITS = {"float16": 16, "Float16": 16, "halffloat": 16, "float32": 32, "Float32": 32, "float": 32}


def narrow_columns(table: Any) -> dict[str, int]:
    """Return the columns of a table that have floats of fewer than 64 bits, and their bits.

    Args:
        table: an Arrow schema, a ``datasets.Dataset``, or a table of pyarrow, pandas or polars; others have none.
    """
    types: Iterable[tuple[Any, Any]] = ()
    if hasattr(table, "features"):
        # A stream may not know them, and those of a single column have no names.
        features = table.features if isinstance(table.features, Mapping) else {}
        types = ((name, getattr(feature, "dtype", None)) for name, feature in features.items())
    elif hasattr(table, "dtypes") and hasattr(table.dtypes, "items"):  # pandas
        types = table.dtypes.items()
    else:
        schema: Any = getattr(table, "schema", None if isinstance(table, Mapping) else table)
        if hasattr(schema, "names") and hasattr(schema, "types"):  # Arrow's
            types = zip(schema.names, schema.types, strict=True)
        elif isinstance(schema, Mapping):  # polars'
            types = schema.items()
    return {str(name): _BITS[str(kind)] for name, kind in types if str(kind) in _BITS}


def with_shortest_floats(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, int]) -> Iterator[Mapping[str, Any]]:
    """Yield rows whose numbers in some ``columns`` are the shortest decimals that have the same value in their bits."""
    if not columns:
        yield from rows
        return
    import numpy as np

    kinds: dict[int, Callable[[float], object]] = {16: np.float16, 32: np.float32}
    for row in rows:
        changed = {
            name: float(str(kinds[bits](row[name])))
            for name, bits in columns.items()
            if isinstance(row.get(name), float)
        }
        yield {**row, **changed} if changed else row
