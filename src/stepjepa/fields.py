"""The fields of a JSON object from a file, each checked when it is taken, so that errors name file and field."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from stepjepa.errors import UserError, shown
from stepjepa.files import holds_half, read_json_object

_DEEPEST = 60
"""Levels of objects and lists; we write ten at most."""

_LARGEST = 1e60
"""No number that we measure is larger, and squares of such numbers are still numbers."""

_CALLED = {dict: "an object", list: "a list", type(None): "null"}


class Fields:
    """The fields of an object.

    Args:
        values: the object.
        path: of the file, for errors.
        remedy: what to do where a field is missing or wrong.
        line: of the file, where every line has an object of its own.
        within: names of the objects that this one stands in, each with a full stop behind it.
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
        """The names."""
        return iter(self.values)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def wrong(self, name: str, expected: str) -> UserError:
        """The error for a field.

        Args:
            name: of the field.
            expected: what should be there.
        """
        place = shown(f"{self._within}{name}")
        if name not in self.values:
            return self.fault(f"{place} is missing, expected {expected}")
        value = self.values[name]
        told = _CALLED.get(type(value)) or (shown(value) if isinstance(value, str) else shown(repr(value))[1:-1])
        return self.fault(f"{place} is {told}, expected {expected}")

    def fault(self, message: str) -> UserError:
        """The error for the file as a whole."""
        return UserError(f"{message}; {self._remedy}", path=self._path, line=self._line)

    def text(self, name: str) -> str:
        """A string."""
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def text_or_none(self, name: str) -> str | None:
        """A string; None where the field is missing or null."""
        return None if self.values.get(name) is None else self.text(name)

    def whole(self, name: str, least: int | None = None) -> int:
        """A whole number.

        Args:
            name: of the field.
            least: the smallest that is allowed.
        """
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _LARGEST:
            raise self.wrong(name, "a whole number" if least is None else f"a whole number of at least {least}")
        if least is not None and value < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        return value

    def whole_or_none(self, name: str, least: int | None = None) -> int | None:
        """A whole number; None where the field is missing or null."""
        return None if self.values.get(name) is None else self.whole(name, least)

    def number(self, name: str) -> float:
        """A finite number; true is 1 and false is 0."""
        value = self.values.get(name)
        if not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise self.wrong(name, "a number")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A number; None where the field is missing, null, or not finite, as the loss of a model that has diverged."""
        value = self.values.get(name)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        return self.number(name)

    def amount_or_none(self, name: str) -> float | None:
        """As :meth:`number_or_none`, of what is counted or measured: 0, or large enough to be divided by."""
        value = self.number_or_none(name)
        if value is not None and not (value == 0 or value >= 1 / _LARGEST):
            raise self.wrong(name, "a number of at least 0")
        return value

    def inner(self, name: str) -> Fields:
        """An object."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self._path, self._remedy, line=self._line, within=f"{self._within}{name}.")

    def inner_or_none(self, name: str) -> Fields | None:
        """An object; None where the field is missing or null."""
        return None if self.values.get(name) is None else self.inner(name)


def read_fields(path: str | os.PathLike[str], what: str, remedy: str) -> Fields:
    """The object that a JSON file holds, with its fields checked as they are read; see :func:`read_json_object`."""
    return checked_fields(read_json_object(path, what, remedy), path, remedy)


def checked_fields(
    value: dict[str, Any], path: str | os.PathLike[str], remedy: str, *, line: int | None = None
) -> Fields:
    """An object that can be written again, in whole or in part.

    Raises:
        UserError: it holds half of a character, or objects in objects without end.
    """
    found = Fields(value, path, remedy, line=line)
    if holds_half(value):
        raise found.fault("is damaged: holds half of a character (a lone surrogate)")
    if _deeper(value, _DEEPEST):
        raise found.fault(f"is damaged: holds objects or lists in more than {_DEEPEST} levels")
    return found


def _deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested in more than so many levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_deeper(each, levels - 1) for each in inner))
