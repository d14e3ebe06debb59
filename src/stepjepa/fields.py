"""Access to the fields of a JSON object from a file, checked on access, with errors that name file and field."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar, final

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import read_json_object

_LARGEST = 1e60
"""Largest magnitude of a number: measured numbers are smaller, and its square is still a finite float."""

T = TypeVar("T")


def _or_none(read: Callable[[Fields, str], T]) -> Callable[[Fields, str], T | None]:
    return lambda self, name: None if self.values.get(name) is None else read(self, name)


@final
@dataclass
class Fields:
    """The fields of a JSON object. A method with ``_or_none`` returns None for a field that is missing or null."""

    values: Mapping[str, Any]
    path: object  # of the file, for errors
    remedy: str  # what to do if a field is missing or wrong, for errors
    line: int | None = None  # of the object in a JSON Lines file, for errors
    within: str = ""  # path of the object inside the file, as in ``outer.inner.``, for errors

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def wrong(self, name: str, expected: str) -> UserError:
        """The error for a missing or wrong field, which says what is ``expected``."""
        there = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return self.fault(f"{shown(self.within + name)} {there}, expected {expected}")

    def fault(self, message: str) -> UserError:
        """An error with this message, the remedy and the place in the file."""
        return UserError(f"{message}; {self.remedy}", path=self.path, line=self.line)

    def text(self, name: str) -> str:
        """The value of a string field."""
        if not isinstance(value := self.values.get(name), str):
            raise self.wrong(name, "a text")
        return value

    def whole(self, name: str, least: int = -(10**60)) -> int:
        """The value of an integer field, which is at least ``least``."""
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
            raise self.wrong(name, "a whole number" if least < -1 else f"a whole number of at least {least}")
        return value

    def number(self, name: str) -> float:
        """The value of a field that holds a finite number; true is 1 and false is 0."""
        value = self.values.get(name)
        if not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise self.wrong(name, "a number")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A number; None also if it is not finite, as the loss of a diverged model is."""
        value = self.values.get(name)
        return None if value is None or (isinstance(value, float) and not isfinite(value)) else self.number(name)

    def inner(self, name: str) -> Fields:
        """The fields of a nested object."""
        if not isinstance(value := self.values.get(name), dict):
            raise self.wrong(name, "an object")
        return Fields(value, self.path, self.remedy, self.line, f"{self.within}{name}.")

    text_or_none = _or_none(text)
    whole_or_none = _or_none(whole)
    inner_or_none = _or_none(inner)


def read_fields(path: str | os.PathLike[str], what: str, remedy: str) -> Fields:
    """Read a JSON file that holds one object, and return its fields; arguments as for :func:`read_json_object`."""
    return Fields(read_json_object(path, what, remedy), path, remedy)
