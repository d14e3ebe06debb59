"""Rows of raw data sets: the texts, lists and labels in them, and the records that they become."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

_ITEM = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


class Unusable(ValueError):  # noqa: N818  # a verdict on a row, not a mishap
    """A row that no record can be made of; the message is the reason, the same for like rows."""


def chat_record(system: str, user: str, assistant: str, **extra: Any) -> dict[str, Any]:
    """A training record of three messages, and perhaps other fields."""
    contents = {"system": system, "user": user, "assistant": assistant}
    return {"messages": [{"role": role, "content": content} for role, content in contents.items()], **extra}


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


def read_label_field(row: Mapping[str, Any], count: int) -> int:
    """The field ``label``, a number below ``count``; :class:`Unusable` if it is missing or another."""
    label = as_label(row.get("label"))
    if label is None:
        raise Unusable("no label")
    if label not in map(str, range(count)):
        raise Unusable(f"the label is none of 0 to {count - 1}")
    return int(label)


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; None for anything else.

    Text is taken for a list of strings if it is written as one: by Python or JSON (``['a', "b"]``), or by NumPy
    (``['a' 'b']``), which Python itself would read as one string.
    """
    if isinstance(value, str):
        text = value.strip()
        # Nothing but commas and white space may stand between the strings.
        if text[:1] != "[" or text[-1:] != "]" or _ITEM.sub("", text[1:-1]).strip(", \t\r\n"):
            return None
        try:
            return [ast.literal_eval(item.replace("\n", "\\n")) for item in _ITEM.findall(text[1:-1])]
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
    label = re.sub(r"^(-?[0-9]+)\.0+$", r"\1", label)
    return None if label.lower() in ("", "-1", "none", "nan") else label
