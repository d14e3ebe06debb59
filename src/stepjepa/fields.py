"""Access to the fields of a JSON object from a file, checked on access, with errors that name file and field."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from stepjepa.errors import UserError, shown
from stepjepa.files import holds_half, read_json_object

_DEEPEST = 60
"""Most levels of nested objects and lists; our own files have ten at most."""

_LARGEST = 1e60
"""Largest magnitude of a number: measured numbers are smaller, and its square is still a finite float."""

_CALLED = {dict: "an object", list: "a list", type(None): "null"}


class Fields:
    """The fields of a JSON object.

    Args:
        values: the object.
        path: path of the file, for errors.
        remedy: what to do if a field is missing or wrong, for errors.
        line: line of the object in a JSON Lines file, for errors.
        within: path of the object inside the file, as in ``outer.inner.``, for errors.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str | os.PathLike[str],
        remedy: str,
        *,
        line: int | None = None,
        within: str = "",
    ) -> None:
        self.values = values
        self._path, self._remedy, self._line, self._within = path, remedy, line, within

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the fields."""
        return iter(self.values)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def wrong(self, name: str, expected: str) -> UserError:
        """The error for a missing or wrong field.

        Args:
            name: name of the field.
            expected: description of a correct value.
        """
        place = shown(f"{self._within}{name}")
        if name not in self.values:
            return self.fault(f"{place} is missing, expected {expected}")
        value = self.values[name]
        told = _CALLED.get(type(value)) or (shown(value) if isinstance(value, str) else shown(repr(value))[1:-1])
        return self.fault(f"{place} is {told}, expected {expected}")

    def fault(self, message: str) -> UserError:
        """An error with this message, the remedy and the place in the file."""
        return UserError(f"{message}; {self._remedy}", path=self._path, line=self._line)

    def text(self, name: str) -> str:
        """The value of a string field."""
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def text_or_none(self, name: str) -> str | None:
        """The value of a string field; None if the field is missing or null."""
        return None if self.values.get(name) is None else self.text(name)

    def whole(self, name: str, least: int | None = None) -> int:
        """The value of an integer field.

        Args:
            name: name of the field.
            least: the smallest allowed value.
        """
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _LARGEST:
            raise self.wrong(name, "a whole number" if least is None else f"a whole number of at least {least}")
        if least is not None and value < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        return value

    def whole_or_none(self, name: str, least: int | None = None) -> int | None:
        """The value of an integer field; None if the field is missing or null."""
        return None if self.values.get(name) is None else self.whole(name, least)

    def number(self, name: str) -> float:
        """The value of a field that holds a finite number; true is 1 and false is 0."""
        value = self.values.get(name)
        if not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise self.wrong(name, "a number")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A number; None if the field is missing, null, or not finite, as the loss of a diverged model is."""
        value = self.values.get(name)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        return self.number(name)

    def amount_or_none(self, name: str) -> float | None:
        """As :meth:`number_or_none`, for a count or a measurement: 0, or at least ``1 / _LARGEST`` (a safe divisor)."""
        value = self.number_or_none(name)
        if value is not None and not (value == 0 or value >= 1 / _LARGEST):
            raise self.wrong(name, "a number of at least 0")
        return value

    def inner(self, name: str) -> Fields:
        """The fields of a nested object."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self._path, self._remedy, line=self._line, within=f"{self._within}{name}.")

    def inner_or_none(self, name: str) -> Fields | None:
        """The fields of a nested object; None if the field is missing or null."""
        return None if self.values.get(name) is None else self.inner(name)


def read_fields(path: str | os.PathLike[str], what: str, remedy: str) -> Fields:
    """Read a JSON file that holds one object, and return its fields; arguments as for :func:`read_json_object`."""
    return checked_fields(read_json_object(path, what, remedy), path, remedy)


def checked_fields(
    value: dict[str, Any], path: str | os.PathLike[str], remedy: str, *, line: int | None = None
) -> Fields:
    """The fields of an object, after a check that the object can be written to JSON again.

    Raises:
        UserError: the object holds a lone surrogate, or is nested too deeply.
    """
    found = Fields(value, path, remedy, line=line)
    if holds_half(value):
        raise found.fault("is damaged: holds half of a character (a lone surrogate)")
    if _deeper(value, _DEEPEST):
        raise found.fault(f"is damaged: holds objects or lists in more than {_DEEPEST} levels")
    return found


def _deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested in more than ``levels`` levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_deeper(each, levels - 1) for each in inner))
