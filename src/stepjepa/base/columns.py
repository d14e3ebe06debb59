"""Text for a terminal: aligned columns of at most 80 characters, numbers in place of long names, wrapped lines."""

import textwrap
import unicodedata
from collections.abc import Sequence

WIDTH = 80
"""Maximum width of text for a terminal, in characters."""

_LONGEST_NAME = 36


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes: Chinese characters and emoji take two, accents none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "FW" else 1 for char in text
    )


def aligned_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns, in blocks of at most :data:`WIDTH`; each block repeats the first column."""
    widths = [max(_width(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    blocks: list[list[int]] = [[]]
    for place in range(1, len(columns)):
        if blocks[-1] and widths[0] + sum(2 + widths[column] for column in (*blocks[-1], place)) > WIDTH:
            blocks.append([])
        blocks[-1].append(place)
    lines = (columns, ["-" * width for width in widths], *rows)
    return "\n\n".join(
        "\n".join(
            "  ".join(
                [
                    line[0] + " " * (widths[0] - _width(line[0])),
                    *(" " * (widths[place] - _width(line[place])) + line[place] for place in block),
                ]
            ).rstrip()
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
