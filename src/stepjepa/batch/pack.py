"""Sequences of a micro-batch to rows of tokens in which every common beginning stands once: prefix trees in preorder.

Sorted, each sequence adds only what comes behind its longest common prefix with the one before it. Laid out in that
order the tokens of a row are prefix trees in preorder, and two integers a token say who sees whom (see
``mask``): the tree of token k ends at ``end[k]``, and token q sees nothing before ``start[q]``.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.batch.sequences import Numbers, Sequence

PASS_COST = 64
"""What one more forward pass costs on a CPU, in tokens (measured on tiny models, where it counts most)."""


@dataclass(frozen=True)
class Rows:
    """Packed sequences for one forward pass: R rows of T tokens, padded on the right."""

    ids: Numbers  # [R, T] token ids
    positions: Numbers  # [R, T] place of each token in its own sequences: its depth in the tree
    start: Numbers  # [R, T] first place in the row that the token sees; 0 almost everywhere
    end: Numbers  # [R, T] one past the last place in the row that sees the token, as far as causality allows
    # For each sequence, as they were given, the flat place (row * T + column) of each of its tokens. In several passes
    # the places of one come behind those of the pass before, and all have the paths of all.
    paths: list[Numbers]
    lengths: Numbers  # [R] tokens of each row without padding
    branches: bool  # some token of a row does not see all that is before it; else rows are ordinary causal text


def pack(sequences: Many[Sequence], *, row_length: int, **options: Any) -> Rows:
    """Pack sequences for a single forward pass, see :func:`pack_passes`."""
    return pack_passes(sequences, row_length=row_length, **options)[0]


def pack_passes(
    sequences: Many[Sequence],
    *,
    row_length: int,
    attention_length: int | None = None,
    groups: Many[int] | None = None,
    one_each: bool = False,
    pad_id: int = 0,
) -> list[Rows]:
    """Pack the sequences of a micro-batch, in any order, for one or several forward passes.

    One pass is cut so that rows x longest row is least. Several, each of rows of like length, are for a CPU, where
    padding and masks cost what they compute, and a further pass next to nothing: a row of n tokens costs
    ``n (1 + n / attention_length)``, or, where nothing branches and no mask is needed, half the square. The best cut of
    the sorted sequences into rows is found first, then the best cut of the rows, sorted by length, into passes.

    Args:
        sequences: of the micro-batch.
        row_length: most tokens of a row; a longer sequence makes rows as long as itself.
        attention_length: tokens of a row at which attention under a mask costs as much as all else; None for one pass.
        groups: for each sequence the number of its record, within which alone it shares prefixes; None shares all.
        one_each: one row for each sequence that is no beginning of another, for models that can't run a tree.
        pad_id: token id of padding.
    """
    if not sequences:
        none = np.zeros((1, 1), np.int64)
        return [Rows(none + pad_id, none, none, none + 1, [], np.zeros(1, np.int64), False)]
    laid = _Sorted(sequences, groups, pad_id)
    if one_each:
        last = np.append(np.flatnonzero(laid.shared[1:] < laid.lengths[:-1]) + 1, len(sequences))
        rows = list(pairwise([0, *last.tolist()]))
    elif attention_length is None:
        rows = list(pairwise(cut(laid.lengths, laid.shared, row_length)))
    else:
        rows = laid.cheapest_rows(row_length, attention_length)
    if attention_length is None:
        return [laid.lay_out(rows)]
    passes: list[Rows] = []
    for masked in (False, True):
        own = sorted((row for row in rows if laid.is_masked(*row) == masked), key=lambda row: laid.size(*row))
        sizes = np.array([laid.size(*row) for row in own], np.int64)
        weight = (1 if masked else 0.5) / attention_length
        passes += [laid.lay_out(own[first:last]) for first, last in _cheapest_passes(sizes, weight)]
    return passes


class _Sorted:
    """Sequences in the order in which those that begin alike stand beside each other; a row is a run of them."""

    def __init__(self, sequences: Many[Sequence], groups: Many[int] | None, pad_id: int) -> None:
        self._sequences, self._pad_id = sequences, pad_id
        # [S] in sorted order: their numbers, and how many tokens each has in common with the one before.
        self._order, self.shared = _sorted(sequences, groups)
        self.lengths = np.array([len(sequences[index]) for index in self._order], np.int64)
        self._added = np.concatenate([[0], np.cumsum(self.lengths - self.shared)])
        starts = [sequences[index].start for index in self._order]
        self._isolating = np.cumsum([False, *(start is not None and start.any() for start in starts)])
        self._paths: list[Numbers] = [np.empty(0, np.int64)] * len(sequences)
        self._cells = 0

    def size(self, first: Any, last: Any) -> Any:
        """Tokens of a row of the sequences ``first`` to ``last``; the first is whole, what it shares is repeated."""
        return self._added[last] - self._added[first + 1] + self.lengths[first]

    def is_masked(self, first: Any, last: Any) -> Any:
        """Whether such a row needs a mask: not all are beginnings of its last sequence, or some isolate tokens."""
        branches = self.size(first, last) > self.lengths[last - 1]
        return branches | (self._isolating[last] > self._isolating[first])

    def cheapest_rows(self, row_length: int, attention_length: int) -> list[tuple[int, int]]:
        """The rows that cost least, padding left aside."""

        def costs(first: Numbers, last: int) -> NDArray[np.float64]:
            sizes = self.size(first, last)
            weights = np.where(self.is_masked(first, last), 1.0, 0.5) / attention_length
            return np.where((sizes > row_length) & (first < last - 1), np.inf, sizes * (1 + sizes * weights))

        return _cheapest_parts(len(self.lengths), costs)

    def lay_out(self, rows: list[tuple[int, int]]) -> Rows:
        """The tokens of some rows, each of the sequences from its first up to its last."""
        sizes = np.array([self.size(*row) for row in rows], np.int64)
        width = int(sizes.max())
        cells = len(rows) * width
        # Padding is causal text by itself, so that no query is left without a key: its subtree ends with the row.
        ids, positions, start, end = (np.full(cells, value) for value in (self._pad_id, 0, 0, width))
        path = np.empty(int(self.lengths.max()), np.int64)  # where the tokens of the latest sequence stand
        for number, (first, last) in enumerate(rows):
            place = begin = number * width
            before = 0
            for index in range(first, last):
                sequence = self._sequences[self._order[index]]
                shared, length = int(self.shared[index]) if index > first else 0, len(sequence)
                # Of what this sequence does not begin with, the subtrees are over.
                end[path[shared:before]] = place - begin
                path[shared:length] = own = np.arange(place, place + length - shared)
                ids[own], positions[own] = sequence.ids[shared:], np.arange(shared, length)
                if sequence.start is not None:
                    start[own] = path[sequence.start[shared:]] - begin
                self._paths[self._order[index]] = path[:length] + self._cells
                place, before = place + length - shared, length
            end[path[:before]] = place - begin
        self._cells += cells
        shape, branches = (-1, width), any(self.is_masked(*row) for row in rows)
        ids, positions = ids.reshape(shape), positions.reshape(shape)
        return Rows(ids, positions, start.reshape(shape), end.reshape(shape), self._paths, sizes, branches)


def _sorted(sequences: Many[Sequence], groups: Many[int] | None) -> tuple[list[int], Numbers]:
    """The order that puts common beginnings beside each other, and how much each has in common with the one before."""
    keys = [sequence.ids.astype(np.int64) for sequence in sequences]
    for number, sequence in enumerate(sequences):
        if sequence.start is not None:
            # A prefix is common only where the tokens see the same, too.
            keys[number] = keys[number] | (sequence.start.astype(np.int64) << 32)
    # The bytes of numbers sort in some order, and any order puts common beginnings beside each other.
    blobs = [key.tobytes() for key in keys]
    group = [0] * len(keys) if groups is None else groups
    order = sorted(range(len(keys)), key=lambda index: (group[index], blobs[index]))
    shared = np.zeros(len(keys), np.int64)
    for place, (before, own) in enumerate(pairwise(order), start=1):
        if group[before] == group[own]:
            size = min(len(keys[before]), len(keys[own]))
            differs = keys[before][:size] != keys[own][:size]
            shared[place] = int(differs.argmax()) if differs.any() else size
    return order, shared


def cut(lengths: Numbers, shared: Numbers, row_length: int) -> list[int]:
    """Cut sorted sequences of ``[S]`` tokens, so many in common with the one before, so that rows x longest is least.

    Where rows begin, and the end of the last one. Rows of more than ``row_length`` hold one sequence, or are no longer
    than the longest one.
    """
    added = np.concatenate([[0], np.cumsum(lengths - shared)])

    def rows_within(cap: int) -> list[int]:
        bounds = [0]
        while (first := bounds[-1]) < len(lengths):
            # A row is its first sequence, whole, and what the others add.
            limit = added[first + 1] + cap - lengths[first]
            bounds.append(int(np.searchsorted(added, limit, "right")) - 1)
        return bounds

    def cells(bounds: list[int]) -> int:
        firsts, lasts = np.array(bounds[:-1]), np.array(bounds[1:])
        return int((added[lasts] - added[firsts + 1] + lengths[firsts]).max()) * len(firsts)

    longest = int(lengths.max())
    caps = np.unique(np.linspace(longest, max(longest, row_length), 24).astype(int)).tolist()
    return min(map(rows_within, caps), key=cells)


def _cheapest_passes(sizes: Numbers, weight: float) -> list[tuple[int, int]]:
    """Cut rows, whose sizes ascend, into passes so that the work is least; a row of n tokens costs n (1 + weight n)."""

    def costs(first: Numbers, last: int) -> NDArray[np.float64]:
        longest = sizes[last - 1]
        found: NDArray[np.float64] = (last - first) * longest * (1 + weight * longest) + PASS_COST
        return found

    return _cheapest_parts(len(sizes), costs)


def _cheapest_parts(count: int, costs: Callable[[Numbers, int], NDArray[np.float64]]) -> list[tuple[int, int]]:
    """Cut 0 .. count into consecutive parts of least total cost, by dynamic programming.

    ``costs(first, last)`` of the parts from each of several first things up to (and without) a last one.
    """
    # best[j]: least cost of the first j things; before[j]: where the last part of that solution begins.
    best, before = np.zeros(count + 1), [0] * (count + 1)
    for last in range(1, count + 1):
        totals = best[:last] + costs(np.arange(last), last)
        before[last] = int(totals.argmin())
        best[last] = totals[before[last]]
    parts, last = [], count
    while last:
        parts.append((before[last], last))
        last = before[last]
    return parts[::-1]
