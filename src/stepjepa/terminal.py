"""Standard streams that always work, text that a terminal shows but never obeys, rows for people, JSON for programs."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from stepjepa.errors import visible

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100
"""Columns that rows for people take at most, however wide the terminal is."""


def visible_lines(text: str) -> str:
    """A text of several lines in which only the line ends do anything to a terminal; see ``errors.visible``."""
    return "\n".join(map(visible, text.split("\n")))


def open_standard_streams() -> None:
    """Make standard input, output and error usable where a service was started without them, or with few characters."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken; left closed, the next file that is opened would become standard output.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            # A terminal of ASCII or Latin-1 shows \u2013 instead of ending the program.
            stream.reconfigure(errors="backslashreplace")


def make_console(width: int, *, colours: bool = True) -> Console:
    """Rich's console on standard output; without colours also where ``NO_COLOR`` is set."""
    from rich.console import Console

    # Without a size the library takes every terminal that it calls dumb for 80 columns wide.
    lines = shutil.get_terminal_size().lines
    return Console(file=sys.stdout, width=width, height=lines, no_color=None if colours else True)


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print named lines: aligned and wrapped where standard output is a terminal, ``name: text`` where it is not.

    Args:
        rows: names, and what there is to say of each.
    """
    shown = [(visible(name), visible(text)) for name, text in rows]
    if not sys.stdout.isatty():
        print("\n".join(f"{name}: {text}" for name, text in shown), flush=True)
        return
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = make_console(min(shutil.get_terminal_size().columns, WIDEST))
    plain = console.no_color or console.color_system is None
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=9, no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in shown:
        table.add_row(Text(name, "" if plain else "bold cyan"), Text(text))
    console.print(Padding(table, (0, 0, 0, 2)))


def print_json(value: Any) -> None:
    """Print one JSON document; numbers that are not finite, which JSON does not have, are null in it."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False), flush=True)


def finite(value: Any) -> Any:
    """The same with None in the place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


@contextmanager
def lines_to_stderr(wanted: bool) -> Iterator[None]:
    """Send what is printed for people to standard error, so that standard output is left to one JSON document.

    Args:
        wanted: do so; else nothing is changed.
    """
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def duration(seconds: float) -> str:
    """A length of time as people say it: ``42 s``, ``3 min 07 s``, ``2 h 05 min``, ``3 d 04 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    large, small, words = next(units[1:] for units in _UNITS if whole < units[0])
    return f"{whole // large} {words[0]} {whole % large // small:02d} {words[1]}"


# Up to how many seconds, the two units in seconds, and their names.
_UNITS: tuple[tuple[float, int, int, tuple[str, str]], ...] = (
    (3600, 60, 1, ("min", "s")),
    (86400, 3600, 60, ("h", "min")),
    (math.inf, 86400, 3600, ("d", "h")),
)
