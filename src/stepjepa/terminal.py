"""Terminal output: usable standard streams, escaped control characters, rows for people, JSON for programs."""

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
"""Most columns of the rows for people, however wide the terminal is."""


def visible_lines(text: str) -> str:
    """Escape the control characters of a text except for its line ends; see ``errors.visible``."""
    return "\n".join(map(visible, text.split("\n")))


def open_standard_streams() -> None:
    """Make standard input, output and error usable if they are closed or have an encoding such as ASCII."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # os.open takes the lowest free descriptor; otherwise the next file opened would become standard output.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            # Print an escape such as \u2013 instead of raising an error if the encoding is ASCII or Latin-1.
            stream.reconfigure(errors="backslashreplace")


def make_console(width: int, *, colours: bool = True) -> Console:
    """A Rich console on standard output; it also has no colours if ``NO_COLOR`` is set."""
    from rich.console import Console

    # Pass a height, too: Rich otherwise ignores the width on a dumb terminal and assumes 80 columns.
    lines = shutil.get_terminal_size().lines
    return Console(file=sys.stdout, width=width, height=lines, no_color=None if colours else True)


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print named rows: aligned and wrapped if standard output is a terminal, else as ``name: text``.

    Args:
        rows: (name, text) pairs.
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
    """Print one JSON document; numbers that are not finite, which JSON lacks, become null."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False), flush=True)


def finite(value: Any) -> Any:
    """A copy of a JSON value with None in place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


@contextmanager
def lines_to_stderr(wanted: bool) -> Iterator[None]:
    """Redirect what the block prints to standard error, so that standard output holds one JSON document only.

    Args:
        wanted: redirect; otherwise nothing is changed.
    """
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def duration(seconds: float) -> str:
    """Format a duration for people: ``42 s``, ``3 min 07 s``, ``2 h 05 min``, ``3 d 04 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    large, small, words = next(units[1:] for units in _UNITS if whole < units[0])
    return f"{whole // large} {words[0]} {whole % large // small:02d} {words[1]}"


# (upper limit in seconds, the larger and the smaller unit in seconds, their names)
_UNITS: tuple[tuple[float, int, int, tuple[str, str]], ...] = (
    (3600, 60, 1, ("min", "s")),
    (86400, 3600, 60, ("h", "min")),
    (math.inf, 86400, 3600, ("d", "h")),
)
