"""Arguments of settings classes: their list in ``help(...)``, and the error for a mistyped one."""

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, TypeVar

from stepjepa.config.option import Option, options_of

T = TypeVar("T", bound=type)

Elsewhere = Callable[[str, object], Mapping[str, str]]
"""Takes a mistyped argument and its value; returns settings that are no argument of the class, as they are passed."""


def documented(elsewhere: Elsewhere) -> Callable[[T], T]:
    """Decorate a dataclass of options: its docstring lists them, and an unknown argument is answered by a name.

    The list is made of the texts of :func:`stepjepa.config.option.option`. The error is a ``TypeError``, as that of
    every call with an unknown argument.
    """

    def decorate(cls: T) -> T:
        init, names = vars(cls)["__init__"], [each.name for each in fields(cls) if each.init]
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nArgs:\n" + "\n".join(map(_line, options_of(cls)))

        @wraps(init)
        def checked(self: object, *arguments: Any, **values: Any) -> None:
            if unknown := [name for name in values if name not in names]:
                name, value = unknown[0], values[unknown[0]]
                remedy = _remedy(name, names, elsewhere(name, value)) or f"help({cls.__name__}) lists all"
                raise TypeError(f"{cls.__name__} has no argument '{name}'; {remedy}")
            init(self, *arguments, **values)

        setattr(cls, "__init__", checked)  # noqa: B010  # mypy refuses the assignment
        return cls

    return decorate


def _line(each: Option) -> str:
    default = "" if each.default is None or each.default is MISSING else f" (default {each.default!r})"
    values = f" [{', '.join(each.choices)}]" if each.choices else ""
    return textwrap.fill(
        f"{each.name}: {each.about['help']}{values}{default}",
        width=116,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _remedy(name: str, names: list[str], others: Mapping[str, str]) -> str | None:
    """Return what to pass instead of an unknown argument; None if nothing is like it."""
    if name in others:
        return f"pass {others[name]}"
    near = [each for each in names if each.startswith(f"{name}_")]
    near = near or difflib.get_close_matches(name, [*names, *others], n=1)
    near = near or [each for each in names if name in each.split("_")]
    return f"did you mean {' or '.join(others.get(each, each) for each in near)}?" if near else None
