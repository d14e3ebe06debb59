"""Tables of plain text that fit a terminal of 80 columns: columns that don't fit are stacked below, under the names."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 80
UNKNOWN = "–"
"""Stands for what is not known or not tested."""

# Longer names of rows are replaced by numbers, so that numbers fit beside them.
_LONGEST_NAME = 36


@dataclass(frozen=True)
class Table:
    """One table of text.

    Attributes:
        title: what it shows.
        columns: their heads.
        rows: as many cells each as there are columns; the first one names the row.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def wrap(text: str, indent: str = "") -> str:
    """A sentence in lines of at most 80 characters, unless a single word is longer."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """The names of rows as tables show them: themselves, or numbers where one of them is too long."""
    if max(map(len, names), default=0) <= _LONGEST_NAME:
        return {name: name for name in names}
    return {name: f"({number})" for number, name in enumerate(dict.fromkeys(names), start=1)}


def legend(names: dict[str, str]) -> str:
    """Lines that tell which numbers stand for which names; empty where names stand for themselves."""
    return "\n".join(wrap(f"{short} {name}", "    ") for name, short in names.items() if short != name)


def as_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH) -> str:
    """Aligned columns, the first one to the left, in blocks that fit a width; each block repeats the first column."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    blocks: list[list[int]] = [[]]
    for place in range(1, len(columns)):
        if blocks[-1] and widths[0] + sum(2 + widths[each] for each in (*blocks[-1], place)) > width:
            blocks.append([])
        blocks[-1].append(place)
    texts = []
    for block in blocks:
        rule = ["-" * each for each in widths]
        texts.append(
            "\n".join(
                "  ".join([row[0].ljust(widths[0]), *(row[place].rjust(widths[place]) for place in block)]).rstrip()
                for row in (columns, rule, *rows)
            )
        )
    return "\n\n".join(texts)
