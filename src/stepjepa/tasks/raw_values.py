"""Values in the rows of raw data sets: texts, and lists and labels as they are or as tables write them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from stepjepa.tasks.base import Unusable

_ITEM = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def read_text_field(row: Mapping[str, Any], name: str) -> str:
    """A field that must hold text; :class:`Unusable` if it is missing, empty or something else."""
    value = row.get(name)
    if value is None:
        raise Unusable(f"no field '{name}'")
    if not isinstance(value, str):
        raise Unusable(f"'{name}' is {type(value).__name__}, not text")
    if not value.strip():
        raise Unusable(f"'{name}' is empty")
    return value


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; None for anything else.

    Text is taken for a list of strings if it is written as one: by Python or JSON (``['a', "b"]``), or by NumPy
    (``['a' 'b']``), which Python itself would read as one string.
    """
    if isinstance(value, str):
        text = value.strip()
        if not (text.startswith("[") and text.endswith("]")):
            return None
        # Nothing but commas and white space may stand between the strings.
        between = _ITEM.sub("", text[1:-1])
        items = _ITEM.findall(text[1:-1])
        if between.strip(", \t\r\n") or (between.strip() and not items):
            return None
        try:
            return [ast.literal_eval(item.replace("\n", "\\n")) for item in items]
        except (ValueError, SyntaxError):
            return None
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
