"""The forest of segments: one record laid out in one row, and who may see whom in it.

This module holds the data structure and its slow, obvious reading (:func:`key_ranges`). What goes into a forest is
decided in ``segments``; the fast mask of a batch is in ``masks``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""The label of a position that predicts nothing (the value that torch's cross-entropy ignores)."""

Kind = Literal["main", "source", "target"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in the row.

    Attributes:
        start: index of its first token in the row.
        end: one past its last token.
        kind: ``main`` (ordinary text), ``source`` (predictor tokens, with a copy of their view where they need one)
            or ``target`` (a view that is predicted).
        parent: index of the segment it hangs on; -1 for a root.
        attachment: how many tokens of the parent it sees, counted from the parent's first.
        isolated: its own tokens see nothing of the parent, although segments below it do. A root needs no such mark.
    """

    start: int
    end: int
    kind: Kind = "main"
    parent: int = -1
    attachment: int = 0
    isolated: bool = False

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Forest:
    """One record as the model sees it.

    Attributes:
        input_ids: ``[T]`` int32, all segments one after the other.
        position_ids: ``[T]`` int32, the position each token would have in a pass of its own.
        shift_labels: ``[T]`` int32, the token that each position must predict (already shifted), or ``IGNORE``.
        segments: in row order; a parent stands before its children.
        pairs: ``[P, 2]`` int32, row indices of the source readout and the target readout of each pair.
        line: line of the record in its file, counted from 1.
        pooled: ``[P, 2]`` int32, how many tokens each readout averages: those up to and including it. None means one.
        triple: three row indices of the main text, ascending, for Semantic Tube Prediction; None for none.
    """

    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    shift_labels: NDArray[np.int32]
    segments: tuple[Segment, ...]
    pairs: NDArray[np.int32]
    line: int = 0
    pooled: NDArray[np.int32] | None = None
    triple: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def is_plain(self) -> bool:
        """An ordinary causal row, for which no mask is needed."""
        return len(self.segments) == 1

    @property
    def _text(self) -> list[Segment]:
        """The segments of the record's own text."""
        return [s for s in self.segments if s.kind == "main" or (s.kind == "target" and s.parent >= 0)]

    @property
    def text_length(self) -> int:
        """Tokens of :meth:`without_views`."""
        return sum(len(segment) for segment in self._text)

    def copy(self) -> Forest:
        """The same with arrays of its own."""
        ids, positions, labels = self.input_ids.copy(), self.position_ids.copy(), self.shift_labels.copy()
        pooled = None if self.pooled is None else self.pooled.copy()
        return Forest(ids, positions, labels, self.segments, self.pairs.copy(), self.line, pooled, self.triple)

    def without_views(self) -> Forest:
        """The main text alone: what is left of the record in a batch that drops the alignment loss.

        Predictor tokens inside the row go too, and what follows them moves up.
        """
        main = self._text
        if len(main) == len(self.segments) == 1:
            return self if not len(self.pairs) else replace(self, pairs=np.empty((0, 2), np.int32), pooled=None)
        keep = np.concatenate([np.arange(s.start, s.end) for s in main])
        return Forest(
            self.input_ids[keep],
            np.arange(len(keep), dtype=np.int32),
            self.shift_labels[keep],
            (Segment(0, len(keep)),),
            np.empty((0, 2), np.int32),
            self.line,
        )


def seen_lengths(segments: tuple[Segment, ...]) -> NDArray[np.int32]:
    """How much of every other segment the tokens of a segment see.

    Returns:
        ``[S, S]`` int32: entry ``(i, j)`` is the number of tokens, from the first, that every token of segment ``i``
        sees of segment ``j``; 0 on the diagonal, where the ordinary causal rule holds.
    """
    seen = np.zeros((len(segments), len(segments)), np.int32)
    for index, segment in enumerate(segments):
        if segment.isolated:
            continue
        ancestor = segment
        while ancestor.parent >= 0:
            seen[index, ancestor.parent] = ancestor.attachment
            ancestor = segments[ancestor.parent]
    return seen


def key_ranges(forest: Forest) -> list[list[tuple[int, int]]]:
    """For each token the row ranges ``[start, end)`` it sees, in row order, neighbours joined."""
    # What stands above each segment, were it not isolated. There may be too many segments for a table of them by them.
    above: list[list[tuple[int, int]]] = []
    result: list[list[tuple[int, int]]] = []
    for segment in forest.segments:
        if segment.parent < 0:
            above.append([])
        else:
            parent = forest.segments[segment.parent]
            above.append(_with_range(above[segment.parent], parent.start, parent.start + segment.attachment))
        seen = [] if segment.isolated else above[-1]
        result += (_with_range(seen, segment.start, token + 1) for token in range(segment.start, segment.end))
    return result


def _with_range(ranges: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Ranges and one behind them, joined where it begins as the last of them ends."""
    if start == end:
        return ranges
    if ranges and ranges[-1][1] == start:
        return [*ranges[:-1], (ranges[-1][0], end)]
    return [*ranges, (start, end)]


def path(forest: Forest, index: int) -> NDArray[np.int32]:
    """Row indices of what a segment's last token sees when its path is written out as one plain row.

    Raises:
        ValueError: an ancestor is isolated, so no plain row gives the same numbers.
    """
    segment = forest.segments[index]
    pieces = [np.arange(segment.start, segment.end, dtype=np.int32)]
    while segment.parent >= 0 and not segment.isolated:
        parent = forest.segments[segment.parent]
        if parent.isolated:
            raise ValueError("expected a path of segments that see their parents, got an isolated segment inside it")
        pieces.append(np.arange(parent.start, parent.start + segment.attachment, dtype=np.int32))
        segment = parent
    return np.concatenate(pieces[::-1])
