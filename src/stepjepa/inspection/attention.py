"""The attention matrix of a record as text: who sees whom, two rows in each line by half blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from stepjepa.inspection.palette import EDGE, READ, Look, name_of
from stepjepa.inspection.record import Inspection, visible_matrix

_HALVES = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}

_LEAST = 8
"""Keys that stand side by side however narrow the terminal is."""


def print_attention(inspection: Inspection, console: Console, look: Look, *, max_tokens: int) -> None:
    """Print the matrix, in stripes of keys one below the other where the terminal is too narrow for all.

    A column's colour is that of the key's segment; without colours a line stands where a segment starts. Rows at which
    an embedding is read are marked.

    Args:
        inspection: from ``inspection.inspect_record``.
        console: where to.
        look: made for it.
        max_tokens: longest row that is drawn.
    """
    size = len(inspection.tokens)
    told = ", coloured by the segment seen" if look.coloured else f", {EDGE} where a segment starts"
    console.print(Text(f"attention (down: who looks, across: what it sees{told})", "bold"))
    if size > max_tokens:
        reason = f"{size} tokens are more than --max_tokens {max_tokens}; raise it"
        console.print(Text(f"  not drawn: {reason}, or draw a picture with --png FILE\n"))
        return
    picture = _Picture(inspection, look, console.width)
    for line in picture.lines():
        console.print(line, no_wrap=True, crop=False)
    if not picture.marks_fit and inspection.pairs:
        rows = [f"row {row} {what}" for row, what in picture.marks.items()]
        console.print(Text(f"{READ} read here: {', '.join(rows)}"))
    console.print()


class _Picture:
    """The lines of one matrix on a terminal of a width.

    Attributes:
        marks: what is read at a row.
        marks_fit: the whole matrix stands in one stripe, with its marks beside it.
    """

    def __init__(self, inspection: Inspection, look: Look, width: int) -> None:
        self._segments = inspection.segments
        self._owner = [segment for segment in inspection.segments for _ in range(segment.tokens)]
        self._look = look
        self._size = len(inspection.tokens)
        visible = visible_matrix(inspection)
        self._visible: NDArray[np.bool_] = np.pad(visible, ((0, self._size % 2), (0, 0)))
        self._starts = set() if look.coloured else {segment.start for segment in inspection.segments[1:]}
        self.marks = {token.row: ", ".join(token.readouts) for token in inspection.tokens if token.readouts}
        self._gutter = max(len(name_of(segment)) for segment in inspection.segments) + 6
        beside = max((len(f" {READ} {row} {what}") for row, what in self.marks.items()), default=0)
        self.marks_fit = self._gutter + self._size + len(self._starts) + beside <= width
        if not self.marks_fit:
            # Numbers alone, and marks that a line below explains.
            self._gutter = len(str(self._segments[-1].index)) + 6
        self._room = self._size + len(self._starts) if self.marks_fit else max(_LEAST, width - self._gutter - 2)

    def lines(self) -> Iterator[Text]:
        """Everything, stripe after stripe."""
        first = 0
        while first < self._size:
            last = self._end_of_stripe(first)
            yield self._ticks(first, last)
            yield self._strip(first, last)
            yield from self._rows(first, last)
            first = last
            if first < self._size:
                yield Text()

    def _end_of_stripe(self, first: int) -> int:
        used, last = 0, first
        while last < self._size:
            used += 1 + self._has_edge(last, first)
            if used > self._room:
                break
            last += 1
        return last

    def _has_edge(self, key: int, first: int) -> bool:
        return key in self._starts and key > first

    def _ticks(self, first: int, last: int) -> Text:
        line = ""
        for key in range(first, last):
            place = self._gutter + key - first + sum(self._has_edge(each, first) for each in range(first, key + 1))
            # The first key of a stripe has its number where the next one leaves room for it, or where there is none.
            ten = (first // 10 + 1) * 10
            if key % 10 == 0 or (key == first and (ten >= last or first + len(str(first)) < ten)):
                line = f"{line:<{place}}{key}"
        return Text(line)

    def _strip(self, first: int, last: int) -> Text:
        """The names of the segments over their keys."""
        line = Text(" " * self._gutter)
        for segment in self._segments:
            start, end = max(segment.start, first), min(segment.end, last)
            if start >= end:
                continue
            if self._has_edge(start, first):
                line.append(EDGE)
            count = end - start
            name = name_of(segment) if len(name_of(segment)) < count else str(segment.index)[:count]
            line.append(name.ljust(count, "─"), self._look.key(segment))
        return line

    def _rows(self, first: int, last: int) -> Iterator[Text]:
        """The rows that see a key of the stripe, and those between."""
        seeing = np.flatnonzero(self._visible[:, first:last].any(1))
        for top in range(int(seeing[0]) // 2 * 2, int(seeing[-1]) + 1, 2):
            both = [row for row in (top, top + 1) if row < self._size]
            begun = [segment for segment in self._segments if segment.start in both]
            name = "" if not begun else name_of(begun[-1]) if self.marks_fit else str(begun[-1].index)
            line = Text(f"{top:>4} {name:<{self._gutter - 5}}")
            for key in range(first, last):
                if self._has_edge(key, first):
                    line.append(EDGE)
                line.append(
                    _HALVES[bool(self._visible[top, key]), bool(self._visible[top + 1, key])],
                    self._look.key(self._owner[key]),
                )
            read = [row for row in both if row in self.marks]
            if read:
                told = ", ".join(f"{row} {self.marks[row]}" for row in read)
                line.append(f" {READ} {told}" if self.marks_fit else f" {READ}")
            yield line
