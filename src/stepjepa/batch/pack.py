"""Sequences of a micro-batch to rows of tokens in which every common beginning stands once: prefix trees in preorder.

Sorted, each sequence adds only what comes behind its longest common prefix with the one before it. Laid out in that
order the tokens of a row are a forest of prefix trees in preorder, and two integers a token say who sees whom (see
``mask``): the tree of token k ends at ``end[k]``, and token q sees nothing before ``start[q]``.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepjepa.batch.sequences import Sequence

Numbers = NDArray[np.int64]

_CAPS = 24
"""Row lengths that are tried for the best cut."""


@dataclass(frozen=True)
class Rows:
    """Packed sequences, R rows of T tokens, padded on the right.

    Attributes:
        ids: ``[R, T]`` token ids.
        positions: ``[R, T]`` place of each token in its own sequences: its depth in the tree.
        start: ``[R, T]`` first place in the row that the token sees; 0 almost everywhere.
        end: ``[R, T]`` one past the last place in the row that sees the token, as far as causality allows.
        paths: for each sequence, in the order in which they were given, the flat place (row * T + column) of each of
            its tokens.
        lengths: ``[R]`` tokens of each row without padding.
        branches: whether some token of a row does not see all that is before it; else rows are ordinary causal text.
    """

    ids: Numbers
    positions: Numbers
    start: Numbers
    end: Numbers
    paths: list[Numbers]
    lengths: Numbers
    branches: bool


def pack(
    sequences: Many[Sequence],
    *,
    row_length: int,
    groups: Many[int] | None = None,
    one_each: bool = False,
    pad_id: int = 0,
) -> Rows:
    """Pack sequences.

    Args:
        sequences: of a micro-batch.
        row_length: most tokens of a row; a longer sequence makes rows as long as itself.
        groups: for each sequence the number of its group (its record); prefixes are shared within a group alone. None
            shares them over the whole batch.
        one_each: one row for each sequence, for models that can't run a tree. A sequence that is a beginning of another
            has no row of its own.
        pad_id: token id of padding.
    """
    if not sequences:
        none = np.zeros((1, 1), np.int64)
        return Rows(none + pad_id, none, none, none + 1, [], np.zeros(1, np.int64), False)
    order, shared = _sorted(sequences, groups)
    lengths = np.array([len(sequences[index]) for index in order], np.int64)
    if one_each:
        bounds, shared = _rows_of_ends(lengths, shared)
    else:
        bounds = cut(lengths, shared, row_length)
    # The first sequence of a row shares nothing: what it had in common is repeated.
    shared[bounds[:-1]] = 0
    new = lengths - shared
    sizes = np.add.reduceat(new, bounds[:-1])
    shape = len(sizes), int(sizes.max())
    ids, positions, start = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    end = np.broadcast_to(sizes[:, None], shape).copy()
    # Padding is causal text by itself, so that no query is left without a key.
    for row, size in enumerate(sizes):
        end[row, size:] = shape[1]
    offsets = np.cumsum(new) - new - np.repeat(np.cumsum(sizes) - sizes, np.diff(bounds))
    paths: list[Numbers] = [np.empty(0, np.int64)] * len(sequences)
    path = np.empty(int(lengths.max()), np.int64)
    for row in range(len(sizes)):
        for number in range(bounds[row], bounds[row + 1]):
            sequence, first, length, place = sequences[order[number]], shared[number], lengths[number], offsets[number]
            path[first:length] = np.arange(place, place + length - first)
            own = slice(place, place + length - first)
            ids[row, own] = sequence.ids[first:]
            positions[row, own] = np.arange(first, length)
            if sequence.start is not None:
                start[row, own] = path[sequence.start[first:]]
            paths[order[number]] = path[:length] + row * shape[1]
        part = slice(bounds[row], bounds[row + 1])
        _close(end[row], shared[part], lengths[part], offsets[part])
    branches = bool((np.delete(shared, bounds[:-1]) < np.delete(lengths, bounds[1:] - 1)).any()) or bool(start.any())
    return Rows(ids, positions, start, end, paths, sizes, branches)


def _close(end: Numbers, shared: Numbers, lengths: Numbers, offsets: Numbers) -> None:
    """Set where the subtrees of a row's tokens end: a token of depth d ends where a later sequence shares d or less."""
    closing = np.full(int(lengths.max()), offsets[-1] + lengths[-1] - shared[-1], np.int64)
    for begin, stop, place in zip(shared[::-1], lengths[::-1], offsets[::-1], strict=True):
        end[place : place + stop - begin] = closing[begin:stop]
        closing[begin:] = place


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
    for place in range(1, len(order)):
        before, own = order[place - 1], order[place]
        if group[before] == group[own]:
            size = min(len(keys[before]), len(keys[own]))
            differs = keys[before][:size] != keys[own][:size]
            shared[place] = int(differs.argmax()) if differs.any() else size
    return order, shared


def _rows_of_ends(lengths: Numbers, shared: Numbers) -> tuple[Numbers, Numbers]:
    """A row for each sequence that is not a beginning of the next one."""
    follows = np.append(shared[1:] == lengths[:-1], False)
    bounds = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return bounds, shared.copy()


def cut(lengths: Numbers, shared: Numbers, row_length: int) -> Numbers:
    """Cut sorted sequences into rows so that rows x longest row is least.

    Args:
        lengths: ``[S]`` tokens of each sequence.
        shared: ``[S]`` tokens in common with the one before, which a row repeats if it begins with this one.
        row_length: most tokens of a row; at least the longest sequence is allowed.

    Returns:
        ``[R + 1]`` where rows begin, and the end of the last one.
    """
    added = np.concatenate([[0], np.cumsum(lengths - shared)])

    def rows_within(cap: int) -> list[int]:
        bounds = [0]
        while bounds[-1] < len(lengths):
            first = bounds[-1]
            # A row is its first sequence, whole, and what the others add.
            limit = added[first + 1] + cap - lengths[first]
            bounds.append(int(np.searchsorted(added, limit, "right")) - 1)
        return bounds

    longest = int(lengths.max())
    best: tuple[int, list[int]] | None = None
    for cap in np.unique(np.linspace(longest, max(longest, row_length), _CAPS).astype(int)):
        bounds = rows_within(int(cap))
        firsts, lasts = np.array(bounds[:-1]), np.array(bounds[1:])
        width = int((added[lasts] - added[firsts + 1] + lengths[firsts]).max())
        cells = width * len(firsts)
        if best is None or cells < best[0]:
            best = cells, bounds
    assert best is not None
    return np.array(best[1])
