"""Lists and labels in raw data sets: as they are, or as they look once written into a cell of a table."""

from __future__ import annotations

import ast
import re
from typing import Any

_ITEM = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_BETWEEN = re.compile(r"\s*,\s*|\s+")


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; None for anything else.

    Text is taken for a list of strings if it is written as one: by Python or JSON (``['a', "b"]``), or by NumPy
    (``['a' 'b']``), which Python itself would read as one string.
    """
    if isinstance(value, str):
        return _written(value.strip())
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def as_label(value: Any) -> str | None:
    """A class label as text; None where there is none.

    Whole numbers may be written as fractions, which tables do to a column with gaps (``2.0``). There is no label where
    the value is missing, not a number, or -1, by which data sets of the hub mark records to be tested with.
    """
    label = "" if value is None else str(value).strip()
    label = re.sub(r"\.0+$", "", label) if re.fullmatch(r"-?[0-9]+\.0+", label) else label
    return None if label.lower() in ("", "-1", "none", "nan") else label


def _written(text: str) -> list[Any] | None:
    if not (text.startswith("[") and text.endswith("]")):
        return None
    text = text[1:-1].strip()
    items: list[Any] = []
    at = 0
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None:
            return None
        try:
            items.append(ast.literal_eval(item[0].replace("\n", "\\n")))
        except (ValueError, SyntaxError):
            return None
        between = _BETWEEN.match(text, item.end())
        if between is None and item.end() < len(text):
            return None
        at = between.end() if between else len(text)
    return items
