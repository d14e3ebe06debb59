"""Read JSON objects as dataclasses: every field is checked by its type; errors name file, line, field and remedy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
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
    """Make a dataclass field for whole numbers of at least ``least``."""
    return field(default=default, metadata={"least": least})


def default_of(attribute: Field[Any]) -> object:
    """Return the default of a field of a dataclass; ``dataclasses.MISSING`` for none."""
    return attribute.default if attribute.default_factory is MISSING else attribute.default_factory()


def omitted_if_none() -> Any:
    """Make a dataclass field that is None by default, and is then not written."""
    return field(default=None, metadata={"omitted_if_none": True})


def unknown_fields() -> Any:
    """Make a dataclass field of type ``dict[str, Any]`` for all JSON fields that the class does not define."""
    return field(default_factory=dict, metadata={"unknown_fields": True})


@dataclass(frozen=True)
class Origin:
    """Source of a JSON object (file, line, path within) and the remedy if it is wrong: for error messages."""

    path: object
    remedy: str
    line: int | None = None  # of a JSON Lines file, counted from 1
    within: str = ""  # path of the object inside the file, as in ``outer.inner.``

    def inside(self, name: str) -> Origin:
        """Return the origin of the object in a field."""
        return replace(self, within=f"{self.within}{name}.")

    def error(self, message: str) -> UserError:
        """Make an error with this message, the remedy and the place in the file."""
        return UserError(f"{message}; {self.remedy}", path=self.path, line=self.line)

    def wrong(self, name: str, value: object, expected: str) -> UserError:
        """Make the error for a field of the wrong type; ``expected`` describes the right one."""
        return self.error(f"{shown(self.within + name)} is {shown(value)}, expected {expected}")

    def missing(self, name: str, expected: str) -> UserError:
        """Make the error for a field that is missing; ``expected`` describes its type."""
        return self.error(f"{shown(self.within + name)} is missing, expected {expected}")


def from_json(kind: type[T], values: Mapping[str, object], origin: Origin) -> T:
    """Make an instance of a dataclass from a JSON object.

    Types of fields: ``str``, ``int``, ``float``, ``bool``, ``Literal``, ``Any``, dataclasses, ``list`` and ``dict`` of
    these, and each of them or None. A field with a default may be missing or null. A number must be finite; true is 1
    and false is 0. In a field of type ``float | None`` a number that is not finite, as the loss of a diverged model,
    is None. UserError for the first field that is missing or wrong.

    Args:
        kind: the dataclass.
        values: the JSON object.
        origin: where it was read, for the error.
    """
    hints, arguments, rest_field = _hints(kind), dict[str, Any](), None  # type: ignore[arg-type]  # a class is hashable
    for attribute in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if attribute.metadata.get("unknown_fields"):
            rest_field = attribute.name
            continue
        optional = attribute.default is not MISSING or attribute.default_factory is not MISSING
        if attribute.name not in values and not optional:
            raise origin.missing(attribute.name, _expected(hints[attribute.name], attribute.metadata))
        if values.get(attribute.name) is not None or not optional:
            arguments[attribute.name] = _checked(
                hints[attribute.name], values[attribute.name], origin, attribute.name, attribute.metadata
            )
    if rest_field is not None:
        attributes = {attribute.name for attribute in fields(kind)}  # type: ignore[arg-type]  # a dataclass
        arguments[rest_field] = {name: value for name, value in values.items() if name not in attributes}
    return kind(**arguments)


def read_json(kind: type[T], path: str | os.PathLike[str], what: str, remedy: str) -> T:
    """Read a JSON file that holds one object as a dataclass.

    Args:
        kind: the dataclass.
        path: the file.
        what: the kind of file, for the error if it is missing.
        remedy: what the user can do about a damaged file, for its error.

    Raises:
        UserError: the file is missing or damaged, or a field is missing or wrong.
    """
    return from_json(kind, read_json_object(path, what, remedy), Origin(path, remedy))


def to_json(value: object) -> Any:
    """Return the JSON value of a dataclass, as :func:`from_json` reads it; other values unchanged."""
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    values: dict[str, Any] = {}
    for attribute in fields(value):
        inner = to_json(getattr(value, attribute.name))
        if inner is not None or not attribute.metadata.get("omitted_if_none"):
            values |= inner if attribute.metadata.get("unknown_fields") else {attribute.name: inner}
    return values


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


_WORDS: Mapping[object, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
}
"""Type of a field -> the words for its values."""


def _expected(hint: object, about: Mapping[str, object]) -> str:
    """Describe the values that a field may hold."""
    hint = _without_none(hint)[0]
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if hint is int and "least" in about:
        return f"a whole number of at least {about['least']}"
    return _WORDS.get(get_origin(hint) or hint, "an object")


def _without_none(hint: object) -> tuple[Any, bool]:
    """Return a type without None, and whether it allows None."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (inner,) = (option for option in get_args(hint) if option is not NoneType)
    return inner, True


def _checked(hint: object, value: Any, origin: Origin, name: str, about: Mapping[str, Any]) -> Any:
    """Convert a JSON value to the type of a field; raise UserError if it is of another type."""
    hint, optional = _without_none(hint)
    if hint is Any or (optional and value is None):
        return value
    if optional and hint is float and isinstance(value, float) and not isfinite(value):
        return None
    if not _fits(hint, value, about.get("least", -LARGEST)):
        raise origin.wrong(name, value, _expected(hint, about))
    within, inner = origin.inside(name), get_args(hint)
    if is_dataclass(hint):
        value = from_json(hint, value, within)  # type: ignore[arg-type]  # a dataclass
    elif get_origin(hint) is dict:
        value = {key: _checked(inner[1], item, within, key, {}) for key, item in value.items()}
    elif get_origin(hint) is list:
        value = [_checked(inner[0], item, within, str(place), {}) for place, item in enumerate(value)]
    return float(value) if hint is float else value


def _fits(hint: object, value: object, least: float) -> bool:
    """Return whether a value is of a type, checking only its outermost level."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
    if hint is float:
        return isinstance(value, int | float) and abs(value) <= LARGEST
    kind: Any = dict if is_dataclass(hint) else get_origin(hint) or hint
    return isinstance(value, kind)
