"""Pack sequences into rows that store each shared prefix once (prefix trees in preorder).

The sequences are sorted, so that each adds only the tokens after its longest common prefix with the previous one. Laid
out in that order, the tokens of a row are prefix trees in preorder, and two integers per token define the attention
mask (see ``mask``): the subtree of token k ends at ``end[k]``, and token q sees nothing before ``start[q]``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepjepa.batch.sequences import Numbers, TokenSequence

PASS_COST = 64
"""Cost of one more forward pass on a CPU, in tokens (measured on tiny models, where it matters most)."""


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


def pack(
    sequences: Sequence[TokenSequence],
    *,
    row_length: int,
    groups: Sequence[int] | None = None,
    one_each: bool = False,
    pad_id: int = 0,
) -> Rows:
    """Pack sequences for a single forward pass, see :func:`pack_passes`."""
    return pack_passes(sequences, row_length=row_length, groups=groups, one_each=one_each, pad_id=pad_id)[0]


def pack_passes(
    sequences: Sequence[TokenSequence],
    *,
    row_length: int,
    attention_length: int | None = None,
    groups: Sequence[int] | None = None,
    one_each: bool = False,
    pad_id: int = 0,
) -> list[Rows]:
    """Pack the sequences of a micro-batch, in any order, for one or several forward passes.

    A single pass minimises number of rows x length of the longest row. Several passes, each of rows of similar length,
    are for CPUs, where padding and masked keys cost as much as other tokens and one more pass costs little. There a row
    of n tokens costs ``n (1 + n / attention_length)``, with half the quadratic part if it needs no mask. First the
    sorted sequences are cut into rows, then the rows, sorted by length, into passes; either cut has the least cost.

    Args:
        sequences: those of the micro-batch.
        row_length: maximum tokens of a row; a longer sequence makes rows of its own length.
        attention_length: row length at which masked attention costs as much as the rest of a layer; None for one pass.
        groups: a group for each sequence, its record; only sequences of one group share prefixes. None shares all.
        one_each: one row per sequence that is not a prefix of another, for models that can't run trees.
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
    """Sequences sorted so that common prefixes are adjacent; a row is a range of them."""

    def __init__(self, sequences: Sequence[TokenSequence], groups: Sequence[int] | None, pad_id: int) -> None:
        self._sequences, self._pad_id = sequences, pad_id
        # [S] in sorted order: indices of the sequences, and lengths of the prefixes shared with the previous one.
        self._order, self.shared = _sorted(sequences, groups)
        self.lengths = np.array([len(sequences[index]) for index in self._order], np.int64)
        self._added = np.concatenate([[0], np.cumsum(self.lengths - self.shared)])
        starts = [sequences[index].start for index in self._order]
        self._isolating = np.cumsum([False, *(start is not None and start.any() for start in starts)])
        self._paths: list[Numbers] = [np.empty(0, np.int64)] * len(sequences)
        self._cells = 0

    def sizes(self, first: Numbers, last: int) -> Numbers:
        """Lengths of rows that hold sequences first..last-1, for each of several ``first``.

        The first sequence is stored in full, shared prefix included.
        """
        sizes: Numbers = self._added[last] - self._added[first + 1] + self.lengths[first]
        return sizes

    def masked(self, first: Numbers, last: int) -> NDArray[np.bool_]:
        """Whether such rows need a mask: a sequence is not a prefix of the last one, or isolates tokens."""
        branches = self.sizes(first, last) > self.lengths[last - 1]
        masked: NDArray[np.bool_] = branches | (self._isolating[last] > self._isolating[first])
        return masked

    def size(self, first: int, last: int) -> int:
        """Length of one row, see :meth:`sizes`."""
        return int(self.sizes(np.array([first]), last)[0])

    def is_masked(self, first: int, last: int) -> bool:
        """Whether one row needs a mask, see :meth:`masked`."""
        return bool(self.masked(np.array([first]), last)[0])

    def cheapest_rows(self, row_length: int, attention_length: int) -> list[tuple[int, int]]:
        """Cut the sequences into the rows of least cost, not counting padding."""

        def costs(first: Numbers, last: int) -> NDArray[np.float64]:
            sizes = self.sizes(first, last)
            weights = np.where(self.masked(first, last), 1.0, 0.5) / attention_length
            return np.where((sizes > row_length) & (first < last - 1), np.inf, sizes * (1 + sizes * weights))

        return _cheapest_parts(len(self.lengths), costs)

    def lay_out(self, rows: list[tuple[int, int]]) -> Rows:
        """Write the tokens of rows; each row is a range (first, last) of sequences."""
        sizes = np.array([self.size(*row) for row in rows], np.int64)
        width = int(sizes.max())
        cells = len(rows) * width
        # Padding is causal text of its own, so that every query has a key: its subtrees end with the row.
        ids, positions, start, end = (np.full(cells, value) for value in (self._pad_id, 0, 0, width))
        path = np.empty(int(self.lengths.max()), np.int64)  # flat positions of the latest sequence
        for number, (first, last) in enumerate(rows):
            place = begin = number * width
            before = 0
            for index in range(first, last):
                sequence = self._sequences[self._order[index]]
                shared, length = int(self.shared[index]) if index > first else 0, len(sequence)
                # The subtrees of tokens that are not in this sequence's prefix end here.
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
            size = min(len(keys[before]), len(keys[own]))
            differs = keys[before][:size] != keys[own][:size]
            shared[place] = int(differs.argmax()) if differs.any() else size
    return order, shared


def cut(lengths: Numbers, shared: Numbers, row_length: int) -> list[int]:
    """Cut sorted sequences into rows so that number of rows x length of the longest row is least.

    Args:
        lengths: ``[S]`` tokens of each sequence.
        shared: ``[S]`` length of the prefix that it shares with the previous one.
        row_length: maximum tokens of a row, unless a single sequence is longer.

    Returns:
        The index of the first sequence of every row, and S.
    """
    added = np.concatenate([[0], np.cumsum(lengths - shared)])

    def rows_within(cap: int) -> list[int]:
        bounds = [0]
        while (first := bounds[-1]) < len(lengths):
            # A row holds its first sequence in full, and the tokens that the others add.
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
    """Cut rows of ascending sizes into passes of least cost; a row of n tokens costs ``n (1 + weight n)``."""

    def costs(first: Numbers, last: int) -> NDArray[np.float64]:
        longest = sizes[last - 1]
        total: NDArray[np.float64] = (last - first) * longest * (1 + weight * longest) + PASS_COST
        return total

    return _cheapest_parts(len(sizes), costs)


def _cheapest_parts(count: int, costs: Callable[[Numbers, int], NDArray[np.float64]]) -> list[tuple[int, int]]:
    """Cut ``range(count)`` into consecutive parts of least total cost, by dynamic programming.

    ``costs(first, last)`` are the costs of the parts ``range(first[i], last)``.
    """
    # best[j]: least cost of cutting range(j); before[j]: start of the last part of that solution.
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
