"""Output for people and programs: notes, rows, durations and JSON documents; the colours of figures."""

import io
import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from stepjepa.base.errors import visible

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8577")
"""Colours of series that colour-blind readers can distinguish (Okabe and Ito, without black and yellow, and a grey)."""

MARKED = ("⟦", "⟧")
"""Marks around a part of a text; on a terminal the part is green instead, unless NO_COLOR is set."""

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def visible_lines(text: str) -> str:
    """Escape the control characters of a text except for its line ends; see ``errors.visible``."""
    return "\n".join(map(visible, text.split("\n")))


def escape_unencodable_output() -> None:
    """Print an escape such as ``\\u2013`` instead of raising an error if a standard stream is ASCII or Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


_SPELLING: ContextVar[Callable[[str], str] | None] = ContextVar("spelling", default=None)


@contextmanager
def spelling(spell: Callable[[str], str]) -> Iterator[None]:
    """Print settings inside this context as ``spell`` writes them: the shell has flags where Python has arguments."""
    token = _SPELLING.set(spell)
    try:
        yield
    finally:
        _SPELLING.reset(token)


def spelled(text: str) -> str:
    """Return a text that names settings in backticks in the spelling of the caller, see :func:`spelling`."""
    spell = _SPELLING.get()
    return text if spell is None else spell(text)


def note(text: str) -> None:
    """Print a note on standard error."""
    print(f"note: {spelled(text)}", file=sys.stderr)


def log_to_stderr(level: int) -> None:
    """Write records of Python's logging to standard error from ``level`` on, unless logging is set up already."""
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print (name, text) rows: aligned and wrapped if standard output is a terminal, else as ``name: text``."""
    width = min(shutil.get_terminal_size().columns, 100)
    indent = max(len(name) for name, _ in rows) + 4
    for name, text in ((name, spelled(text)) for name, text in rows):
        if sys.stdout.isatty():
            first = f"  {visible(name)}".ljust(indent)
            filled = textwrap.fill(visible(text), width, initial_indent=first, subsequent_indent=" " * indent)
            if not os.environ.get("NO_COLOR"):
                filled = filled.replace(MARKED[0], _GREEN).replace(MARKED[1], _PLAIN)
            print(filled, flush=True)
        else:
            print(f"{visible(name)}: {visible(text)}", flush=True)


def print_json(value: object) -> None:
    """Print one JSON document: numbers that are not finite become null, unprintable characters are escaped."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    print("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text), flush=True)


def finite(value: object) -> object:
    """Copy a JSON value, with None in place of numbers that are not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def duration(seconds: float) -> str:
    """Format a duration for people: ``42 s``, ``3 min 07 s``, ``2 h 05 min``, ``3 d 04 h``."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    if rounded < 86400:
        return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
    return f"{rounded // 86400} d {rounded % 86400 // 3600:02d} h"
