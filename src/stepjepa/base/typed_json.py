"""Read JSON objects as dataclasses: every field is checked by its type; errors name file, line, field and remedy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import read_json_object

LARGEST = 1e60
"""Largest magnitude of a number: measured numbers are smaller, and its square is still a finite float."""

T = TypeVar("T")


def at_least(least: int, default: Any = MISSING) -> Any:
    """A dataclass field for whole numbers of at least ``least``."""
    return field(default=default, metadata={"least": least})


def omitted_if_none() -> Any:
    """A dataclass field that is None by default, and is then not written."""
    return field(default=None, metadata={"omitted_if_none": True})


def unknown_fields() -> Any:
    """A dataclass field of type ``dict[str, Any]`` for all fields of the JSON object that the class does not name."""
    return field(default_factory=dict, metadata={"unknown_fields": True})


@dataclass(frozen=True)
class Origin:
    """The place that a JSON object was read from, and what to do if it is wrong: for errors."""

    path: object
    remedy: str
    line: int | None = None  # of a JSON Lines file, counted from 1
    within: str = ""  # path of the object inside the file, as in ``outer.inner.``

    def inside(self, name: str) -> Origin:
        """The origin of the object in a field."""
        return replace(self, within=f"{self.within}{name}.")

    def error(self, message: str) -> UserError:
        """An error with this message, the remedy and the place in the file."""
        return UserError(f"{message}; {self.remedy}", path=self.path, line=self.line)

    def wrong(self, name: str, value: Any, expected: str) -> UserError:
        """The error for a field of the wrong type."""
        return self.error(f"{shown(self.within + name)} is {shown(value)}, expected {expected}")

    def missing(self, name: str, expected: str) -> UserError:
        """The error for a field that is missing."""
        return self.error(f"{shown(self.within + name)} is missing, expected {expected}")


def from_json(kind: type[T], values: Mapping[str, Any], origin: Origin) -> T:
    """Make an instance of a dataclass from a JSON object.

    Types of fields: ``str``, ``int``, ``float``, ``bool``, ``Literal``, ``Any``, dataclasses, ``list`` and ``dict`` of
    these, and each of them or None. A field with a default may be missing or null. A number must be finite; true is 1
    and false is 0. In a field of type ``float | None`` a number that is not finite, as the loss of a diverged model,
    is None. UserError for the first field that is missing or wrong.
    """
    hints, known, rest = _hints(kind), dict[str, Any](), None  # type: ignore[arg-type]  # a class is hashable
    for each in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if each.metadata.get("unknown_fields"):
            rest = each.name
            continue
        optional = each.default is not MISSING or each.default_factory is not MISSING
        if each.name not in values and not optional:
            raise origin.missing(each.name, _expected(hints[each.name], each.metadata))
        if values.get(each.name) is not None or not optional:
            known[each.name] = _checked(hints[each.name], values[each.name], origin, each.name, each.metadata)
    if rest is not None:
        named = {each.name for each in fields(kind)}  # type: ignore[arg-type]
        known[rest] = {name: value for name, value in values.items() if name not in named}
    return kind(**known)


def read_json(kind: type[T], path: str | os.PathLike[str], what: str, remedy: str) -> T:
    """Read a JSON file that holds one object as a dataclass; arguments as for ``files.read_json_object``."""
    return from_json(kind, read_json_object(path, what, remedy), Origin(path, remedy))


def to_json(value: Any) -> Any:
    """The JSON value of a dataclass, as :func:`from_json` reads it; other values are returned as they are."""
    if isinstance(value, dict):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    values: dict[str, Any] = {}
    for each in fields(value):
        inner = to_json(getattr(value, each.name))
        if inner is not None or not each.metadata.get("omitted_if_none"):
            values |= inner if each.metadata.get("unknown_fields") else {each.name: inner}
    return values


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _expected(hint: Any, about: Mapping[str, Any]) -> str:
    """What a field must hold, in words."""
    hint = _without_none(hint)[0]
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if hint is int and "least" in about:
        return f"a whole number of at least {about['least']}"
    simple = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
    return simple.get(get_origin(hint) or hint, "an object")


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type without None, and whether it allows None."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (inner,) = (each for each in get_args(hint) if each is not NoneType)
    return inner, True


def _checked(hint: Any, value: Any, origin: Origin, name: str, about: Mapping[str, Any]) -> Any:
    """The value of a field, made of what the JSON object holds; UserError if it is of another type."""
    hint, optional = _without_none(hint)
    if hint is Any or (optional and value is None):
        return value
    if optional and hint is float and isinstance(value, float) and not isfinite(value):
        return None
    if not _fits(hint, value, about.get("least", -LARGEST)):
        raise origin.wrong(name, value, _expected(hint, about))
    within, inner = origin.inside(name), get_args(hint)
    if is_dataclass(hint):
        value = from_json(hint, value, within)  # type: ignore[arg-type]
    elif get_origin(hint) is dict:
        value = {key: _checked(inner[1], each, within, key, {}) for key, each in value.items()}
    elif get_origin(hint) is list:
        value = [_checked(inner[0], each, within, str(place), {}) for place, each in enumerate(value)]
    return float(value) if hint is float else value


def _fits(hint: Any, value: Any, least: float) -> bool:
    """Whether a value is of a type, at its outermost level."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
    if hint is float:
        return isinstance(value, int | float) and abs(value) <= LARGEST
    return isinstance(value, dict if is_dataclass(hint) else get_origin(hint) or hint)
