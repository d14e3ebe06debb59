"""A table, and its parts as text: columns of 80 characters, wrapped lines, numbers, intervals."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from stepjepa.study.evaluated_run import FIGURES

WIDTH = 80
"""Maximum width of text for a terminal, in characters."""

UNKNOWN = "–"
"""Shown for an unknown or untested value."""

_LONGEST_NAME = 36

FIGURE_HEADS = dict(zip(("LM loss", "matched", "shuffled", "tokens", "seconds", "FLOPs"), FIGURES, strict=True))
"""Column head -> name of the figure of a run."""

FIGURE_FORMATS = dict(zip(FIGURE_HEADS, ("{:.3f}", "{:.3f}", "{:.3f}", "{:,.0f}", "{:,.0f}", "{:.3g}"), strict=True))
"""Column head -> format of ``str.format``."""


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows with one cell per column; the first cell names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def aligned_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns, in blocks of at most :data:`WIDTH`; each block repeats the first column."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    blocks: list[list[int]] = [[]]
    for place in range(1, len(columns)):
        if blocks[-1] and widths[0] + sum(2 + widths[column] for column in (*blocks[-1], place)) > WIDTH:
            blocks.append([])
        blocks[-1].append(place)
    lines = (columns, ["-" * width for width in widths], *rows)
    return "\n\n".join(
        "\n".join(
            "  ".join([line[0].ljust(widths[0]), *(line[place].rjust(widths[place]) for place in block)]).rstrip()
            for line in lines
        )
        for block in blocks
    )


def numbered_names(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return row names as tables show them, and a legend: long names are replaced by numbers."""
    if max(map(len, names)) <= _LONGEST_NAME:
        return {name: name for name in names}, ""
    numbers = {name: f"({number})" for number, name in enumerate(names, start=1)}
    return numbers, "\n".join(wrapped(f"{number} {name}", "    ") for name, number in numbers.items()) + "\n\n"


def wrapped(text: str, indent: str = "") -> str:
    """Break a text into lines of at most :data:`WIDTH`; all but the first are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def formatted(value: float | None, pattern: str) -> str:
    """Format a number by a format of ``str.format``; None as :data:`UNKNOWN`."""
    return UNKNOWN if value is None else pattern.format(value)


def interval(low: float | None, high: float | None, spec: str = ".1f") -> str:
    """Format an interval of shares in per cent, with a space before it: `` [9.1, 16.0]``.

    Args:
        low: share, or None without an interval.
        high: share.
        spec: format of each end in per cent.
    """
    return "" if low is None or high is None else f" [{100 * low:{spec}}, {100 * high:{spec}}]"
