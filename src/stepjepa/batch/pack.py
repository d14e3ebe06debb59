"""Pack sequences into rows that store each shared prefix once (prefix trees in preorder).

The sequences are sorted, so that each adds only the tokens after its longest common prefix with the previous one. Laid
out in that order, the tokens of a row are prefix trees in preorder, and two integers per token define the attention
mask (see ``mask``): the subtree of token k ends at ``end[k]``, and token q sees nothing before ``start[q]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepjepa.batch.costs import Costs
from stepjepa.batch.cutting import balanced_cut, cheapest_parts
from stepjepa.batch.mask import Kernel
from stepjepa.batch.segments import Segment, Segments, add_segments, cheapest_calls
from stepjepa.views.sequences import Numbers, TokenSequence, common_prefix

WORTH_GATHERING = 0.05
"""Share of the tokens that one variable-length call must save by sharing: gathering keys costs a GPU as much."""

Range = tuple[int, int]
"""The first and one past the last of some consecutive sequences."""


@dataclass(frozen=True)
class Rows:
    """Packed sequences for one forward pass: R rows of T tokens, padded on the right."""

    ids: Numbers  # [R, T] token ids
    positions: Numbers  # [R, T] position of each token in its own sequences: its depth in the tree
    start: Numbers  # [R, T] first column that the token sees; 0 almost everywhere
    end: Numbers  # [R, T] one past the last column that may see the token
    # For each sequence, in the order of the argument, the flat position (row * T + column) of each of its tokens. Flat
    # positions continue from pass to pass, and every pass holds the paths of all sequences.
    paths: list[Numbers]
    lengths: Numbers  # [R] number of tokens of each row, without padding
    branches: bool  # some token does not see all tokens before it; False for ordinary causal text
    segments: Segments | None = None  # of a single row whose attention runs by segments; None: under a mask, or plain


def pack(
    sequences: Sequence[TokenSequence],
    *,
    row_length: int,
    groups: Sequence[int] | None = None,
    one_each: bool = False,
    pad_id: int = 0,
) -> Rows:
    """Pack sequences for a single forward pass, see :func:`pack_passes`.

    Args:
        sequences: those of the micro-batch.
        row_length: maximum tokens of a row; a longer sequence is alone in a longer row.
        groups: of each sequence the number of its record; see :func:`pack_passes`.
        one_each: see :func:`pack_passes`.
        pad_id: token behind the end of a row.
    """
    return pack_passes(sequences, row_length=row_length, groups=groups, one_each=one_each, pad_id=pad_id)[0]


def pack_passes(
    sequences: Sequence[TokenSequence],
    *,
    row_length: int,
    pass_length: int | None = None,
    costs: Costs | None = None,
    kernel: Kernel = "mask",
    one_pass: bool = False,
    groups: Sequence[int] | None = None,
    one_each: bool = False,
    pad_id: int = 0,
) -> list[Rows]:
    """Pack the sequences of a micro-batch, in any order, for one or several forward passes.

    On a CPU ``costs`` choose what takes the least time: the whole micro-batch as one row whose attention runs by
    segments, or rows of at most ``row_length`` tokens under a mask or, where it needs none, as plain causal text. Rows
    run in several passes, each of rows of similar length, since padding and masked keys cost as much as other tokens
    and one more pass costs little. First the sorted sequences are cut into rows, then the rows, sorted by length, into
    passes; either cut takes the least time. Without ``costs`` there is one pass, and rows are cut so that number of
    rows x length of the longest row is least.

    Args:
        sequences: those of the micro-batch.
        row_length: maximum tokens of a row under a mask; a longer sequence is alone in a longer row.
        pass_length: the same of a pass by segments; None for no limit.
        costs: of a layer on this device; None where they are unknown.
        kernel: the form in which the model runs trees; ``calls`` and ``cheapest`` need ``costs``.
        one_pass: never make several passes.
        groups: a group for each sequence, its record; only sequences of one group share prefixes. None shares all.
        one_each: one row per sequence that is not a prefix of another, for models that can't run trees.
        pad_id: token id of padding.
    """
    if not sequences:
        return [_padding(pad_id)]
    ordered = _SortedSequences(sequences, groups, pad_id)
    if kernel == "varlen" and not one_each and ordered.saved < WORTH_GATHERING:
        # Each sequence is a group of its own, so that none shares a prefix.
        ordered = _SortedSequences(sequences, range(len(sequences)), pad_id)
    passes = ordered.passes_of_rows(row_length, None if one_pass else costs, one_each=one_each)
    if not one_each and kernel != "mask":
        single_rows = ordered.passes_of_segments(None if one_pass else pass_length)
        is_faster = costs is not None and ordered.time_of_segments(single_rows, costs) < ordered.time_of_rows(
            passes, costs
        )
        if kernel != "cheapest" or is_faster:
            return [ordered.lay_out([row], by_segments=True) for row in single_rows]
    return [ordered.lay_out(rows) for rows in passes]


def _padding(pad_id: int) -> Rows:
    """Return a pass of a single token of padding, for a micro-batch without sequences."""
    zero = np.zeros((1, 1), np.int64)
    return Rows(
        ids=zero + pad_id,
        positions=zero,
        start=zero,
        end=zero + 1,
        paths=[],
        lengths=np.zeros(1, np.int64),
        branches=False,
    )


class _SortedSequences:
    """Sequences sorted so that common prefixes are adjacent; a row is a range of them.

    :meth:`lay_out` is called once for each pass, in order, since flat positions continue from pass to pass.
    """

    def __init__(self, sequences: Sequence[TokenSequence], groups: Sequence[int] | None, pad_id: int) -> None:
        self._sequences, self._pad_id = sequences, pad_id
        # [S] in sorted order: indices of the sequences, and lengths of the prefixes shared with the previous one.
        self._order, self.shared = _sorted(sequences, groups)
        self.lengths = np.array([len(sequences[index]) for index in self._order], np.int64)
        # [S + 1] number of tokens that the sequences before each one add to a single row of all of them.
        self._added = np.concatenate([[0], np.cumsum(self.lengths - self.shared)])
        starts = [sequences[index].start for index in self._order]
        # [S + 1] number of the sequences before each one that have tokens that do not see all text before them.
        self._isolating = np.cumsum([False, *(start is not None and start.any() for start in starts)])
        self._paths: list[Numbers] = [np.empty(0, np.int64)] * len(sequences)  # see Rows.paths
        self._cells = 0  # number of tokens, padding included, of the passes laid out so far

    @property
    def saved(self) -> float:
        """Share of all tokens that are not computed, since they are shared."""
        return float(self.shared.sum() / self.lengths.sum())

    def sizes(self, first: Numbers, last: int) -> Numbers:
        """Return the lengths of rows that hold sequences first..last-1, for each of several ``first``.

        The first sequence is stored in full, shared prefix included.
        """
        sizes: Numbers = self._added[last] - self._added[first + 1] + self.lengths[first]
        return sizes

    def masked(self, first: Numbers, last: int) -> NDArray[np.bool_]:
        """Return whether such rows need a mask: a sequence is not a prefix of the last one, or isolates tokens."""
        branches = self.sizes(first, last) > self.lengths[last - 1]
        masked: NDArray[np.bool_] = branches | (self._isolating[last] > self._isolating[first])
        return masked

    def size(self, first: int, last: int) -> int:
        """Return the length of one row, see :meth:`sizes`."""
        return int(self.sizes(np.array([first]), last)[0])

    def is_masked(self, first: int, last: int) -> bool:
        """Return whether one row needs a mask, see :meth:`masked`."""
        return bool(self.masked(np.array([first]), last)[0])

    def passes_of_rows(self, row_length: int, costs: Costs | None, *, one_each: bool) -> list[list[Range]]:
        """Return the rows of each pass; without ``costs`` of a single pass."""
        if one_each:
            last = np.append(np.flatnonzero(self.shared[1:] < self.lengths[:-1]) + 1, len(self.lengths))
            rows = list(pairwise([0, *last.tolist()]))
        elif costs is None:
            rows = list(pairwise(balanced_cut(self.lengths, self.shared, row_length)))
        else:
            rows = self._cheapest_rows(row_length, costs)
        if costs is None:
            return [rows]
        passes: list[list[Range]] = []
        for masked in (False, True):
            of_kind = sorted((row for row in rows if self.is_masked(*row) == masked), key=lambda row: self.size(*row))
            sizes = np.array([self.size(*row) for row in of_kind], np.int64)
            passes += [of_kind[first:last] for first, last in _cheapest_passes(sizes, masked, costs)]
        return passes

    def _cheapest_rows(self, row_length: int, costs: Costs) -> list[Range]:
        """Cut the sequences into the rows that take the least time, not counting padding."""

        def times(first: Numbers, last: int) -> NDArray[np.float64]:
            sizes = self.sizes(first, last)
            too_long = (sizes > row_length) & (first < last - 1)
            return np.where(too_long, np.inf, costs.rows(sizes, self.masked(first, last)))

        return cheapest_parts(len(self.lengths), times)

    def time_of_rows(self, passes: list[list[Range]], costs: Costs) -> float:
        """Return the time of a layer on these passes."""
        total = 0.0
        for rows in passes:
            width, masked = max(self.size(*row) for row in rows), any(self.is_masked(*row) for row in rows)
            total += len(rows) * float(costs.rows(np.array(width), masked)) + costs.forward
        return total

    def passes_of_segments(self, pass_length: int | None) -> list[Range]:
        """Return the row of each pass; there is one pass if its length has no limit."""
        if pass_length is None:
            return [(0, len(self.lengths))]
        return list(pairwise(balanced_cut(self.lengths, self.shared, pass_length)))

    def time_of_segments(self, rows: list[Range], costs: Costs) -> float:
        """Return the time of a layer on passes of one row each, by segments."""
        total = 0.0
        for first, last in rows:
            lengths, shared = self.lengths[first:last], self.shared[first:last].copy()
            shared[0] = 0
            # A sequence that continues the one before, or equals it, belongs to its segment.
            begin = np.append(True, shared[1:] < lengths[:-1]).nonzero()[0]
            queries, keys = np.add.reduceat(lengths - shared, begin), lengths[np.append(begin[1:], last - first) - 1]
            total += cheapest_calls(queries, keys, costs).time + self.size(first, last) * costs.token + costs.forward
        return total

    def lay_out(self, rows: list[Range], *, by_segments: bool = False) -> Rows:
        """Write rows as arrays, for the next pass.

        Args:
            rows: ranges of the sorted sequences.
            by_segments: also list the segments, for a single row that is not plain causal text.
        """
        sizes = np.array([self.size(*row) for row in rows], np.int64)
        width = int(sizes.max())
        cells = len(rows) * width
        # Padding is causal text of its own, so that every query has a key: its subtrees end with the row.
        ids, positions, start, end = (np.full(cells, value) for value in (self._pad_id, 0, 0, width))
        path = np.empty(int(self.lengths.max()), np.int64)  # flat positions of the latest sequence
        segments: list[Segment] = []
        for number, (first, last) in enumerate(rows):
            place = begin = number * width
            before = 0
            for index in range(first, last):
                sequence = self._sequences[self._order[index]]
                shared, length = int(self.shared[index]) if index > first else 0, len(sequence)
                # The subtrees of tokens that are not in this sequence's prefix end here.
                end[path[shared:before]] = place - begin
                path[shared:length] = places = np.arange(place, place + length - shared)
                ids[places], positions[places] = sequence.ids[shared:], np.arange(shared, length)
                if sequence.start is not None:
                    start[places] = path[sequence.start[shared:]] - begin
                self._paths[self._order[index]] = path[:length] + self._cells
                if by_segments:
                    add_segments(segments, place, path[:length].copy(), shared, sequence.start)
                place, before = place + length - shared, length
            end[path[:before]] = place - begin
        self._cells += cells
        branches = any(self.is_masked(*row) for row in rows)
        return Rows(
            ids=ids.reshape(-1, width),
            positions=positions.reshape(-1, width),
            start=start.reshape(-1, width),
            end=end.reshape(-1, width),
            paths=self._paths,
            lengths=sizes,
            branches=branches,
            segments=Segments.of(segments) if by_segments and branches else None,
        )


def _sorted(sequences: Sequence[TokenSequence], groups: Sequence[int] | None) -> tuple[list[int], Numbers]:
    """Sort sequences so that common prefixes are adjacent; also lengths of the prefixes shared with the previous."""
    keys = [sequence.ids.astype(np.int64) for sequence in sequences]
    for number, sequence in enumerate(sequences):
        if sequence.start is not None:
            # A prefix is common only if its tokens also see the same tokens.
            keys[number] = keys[number] | (sequence.start.astype(np.int64) << 32)
    # Any order of the bytes makes common prefixes adjacent.
    blobs = [key.tobytes() for key in keys]
    group = [0] * len(keys) if groups is None else groups
    order = sorted(range(len(keys)), key=lambda index: (group[index], blobs[index]))
    shared = np.zeros(len(keys), np.int64)
    for place, (before, own) in enumerate(pairwise(order), start=1):
        if group[before] == group[own]:
            shared[place] = common_prefix(keys[before], keys[own])
    return order, shared


def _cheapest_passes(sizes: Numbers, masked: bool, costs: Costs) -> list[tuple[int, int]]:
    """Cut rows of ascending sizes into the passes that take the least time, padding included."""

    def times(first: Numbers, last: int) -> NDArray[np.float64]:
        return (last - first) * costs.rows(sizes[last - 1], masked) + costs.forward

    return cheapest_parts(len(sizes), times)
