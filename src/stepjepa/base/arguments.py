"""Checks of arguments in Python: ``TypeError`` for another type, ``ValueError`` for another value, by their names."""

import numbers
import os
import reprlib


def kind_of(value: object) -> str:
    """Return the words for what was passed instead of something else: None, a class by its name, or the type."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_number(name: str, value: object, *, least: int | None = 1) -> None:
    """Raise an error for what is no whole number, or one below ``least``, if that is not None.

    Args:
        name: of the argument.
        value: what was passed.
        least: the smallest number that is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected a whole number, got {reprlib.repr(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected {least} or more, got {value}")


def expanded(path: str | os.PathLike[str]) -> str:
    """Return a path as a text, with the home folder in place of a ``~`` at its start, as a shell passes it on."""
    return os.path.expanduser(path)  # noqa: PTH111  # Path's raises an error for a name such as ~old


def check_path(name: str, value: object, expected: str, remedy: str = "") -> str:
    """Return a path, :func:`expanded`; raise a ``TypeError`` for what is none.

    Args:
        name: of the argument.
        value: what was passed.
        expected: description of the path.
        remedy: what to do with an object in its place; an object with a ``folder`` has that.
    """
    if isinstance(value, str | os.PathLike):
        return expanded(value)
    remedy = "pass its .folder" if hasattr(value, "folder") and not isinstance(value, type) else remedy
    raise TypeError(f"{name}: expected {expected}, got {kind_of(value)}{remedy and f'; {remedy}'}")
