"""Output for people and programs: notes, rows, durations and JSON documents; the colours of figures."""

import codecs
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


_IN_ASCII = {"±": "+-", "–": "-", "×": "x", "Δ": "d", "…": "...", "·": "_", "⏎": "\\n", "⇥": "\\t", "␍": "\\r"}
_IN_ASCII |= {"→": ">", "│": "|", "◂": "<<", MARKED[0]: "[[", MARKED[1]: "]]"}
"""Signs of tables and marked texts, as a stream prints them that can't encode them."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace what a stream can't encode: signs by ASCII, other characters by an escape such as ``\\u2026``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    chars = error.object[error.start : error.end]
    escaped = (_IN_ASCII.get(char) or char.encode("ascii", "backslashreplace").decode() for char in chars)
    return "".join(escaped), error.end


def escape_unencodable_output() -> None:
    """Print signs in ASCII and other characters as escapes, without an error, if a stream is ASCII or Latin-1."""
    codecs.register_error(_in_ascii.__name__, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_in_ascii.__name__)


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
    """Print one JSON document: numbers that are not finite become null, unprintable characters are escaped.

    So is what standard output can't encode, as JSON escapes it, unlike :func:`escape_unencodable_output`.
    """
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"

    def encodable(char: str) -> bool:
        return char.isascii() or char.encode(encoding, "ignore") != b""

    kept = (char == "\n" or (char.isprintable() and encodable(char)) for char in text)
    print("".join(char if keep else json.dumps(char)[1:-1] for char, keep in zip(text, kept, strict=True)), flush=True)


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
