"""Attention on prefix trees without a mask of the whole row: every segment against the keys of its path.

In preorder a row falls into **segments**, runs of tokens each of which is the child of the one before: what each
sequence adds to the tree. The queries of a segment see the keys of their root path and, causally, themselves. That is
ordinary attention of n queries over m >= n keys, aligned at the end. Segments of like size are one call on a CPU
(``Calls``); a GPU runs all of them as one variable-length call (``VarlenSegments``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepjepa.batch.costs import Costs
from stepjepa.batch.cutting import cheapest_parts
from stepjepa.batch.mask import Calls, CallShape, VarlenSegments
from stepjepa.views.sequences import Ids, Numbers


class Segment(NamedTuple):
    """A run of tokens of a row, each of which is the child of the one before."""

    first: int  # column of its first token
    size: int  # number of its tokens
    path: Numbers  # columns of the tokens that its last token sees, in order; its own are the last ones


class Segments(NamedTuple):
    """The S segments of one row, in preorder; together they have every token of the row once."""

    first: Numbers  # [S] column of the first token
    queries: Numbers  # [S] number of tokens
    keys: Numbers  # [S] number of tokens that the last one sees, itself included
    paths: list[Numbers]  # [keys] columns of these, in order; the segment's own are the last ones

    @classmethod
    def of(cls, parts: list[Segment]) -> Segments:
        """Make the table of a list of segments."""
        first, sizes, paths = zip(*parts, strict=True)
        return cls(np.array(first), np.array(sizes), np.array([*map(len, paths)]), list(paths))


def add_segments(segments: list[Segment], place: int, path: Numbers, shared: int, start: Ids | None) -> None:
    """Add the segments of the next sequence of a row: one, or one for each run of tokens with the same start.

    A sequence that continues the one before it lengthens that one's segment.

    Args:
        segments: those of the sequences before it in the row; changed in place.
        place: column of the first token that it adds.
        path: ``[N]`` columns of all its tokens.
        shared: number of tokens that it shares with sequences before it.
        start: ``[N]`` index of the first token of the sequence that each token sees; None if each sees the whole text
            before it.
    """
    added = len(path) - shared
    if shared and start is None and path[shared - 1] == place - 1:
        before = segments.pop()
        segments.append(Segment(before.first, before.size + added, path))
    elif added and (start is None or not start[shared:].any()):
        segments.append(Segment(place, added, path))
    elif added and start is not None:
        changes = np.flatnonzero(np.diff(start[shared:])) + 1 + shared
        bounds = [shared, *changes.tolist(), len(path)]
        segments += [
            Segment(place + first - shared, last - first, path[int(start[first]) : last])
            for first, last in pairwise(bounds)
        ]


# -- On a CPU: few calls, each of segments of like size ----------------------------------------------------------------


class ChosenCall(NamedTuple):
    """The segments of one call."""

    segments: Numbers  # indices of the segments
    causal: bool  # they run as whole paths, without a mask; else only their own queries run, under a mask


class ChosenCalls(NamedTuple):
    """The calls of a row, and the time that they take together."""

    calls: list[ChosenCall]
    time: float


def cheapest_calls(queries: Numbers, keys: Numbers, costs: Costs) -> ChosenCalls:
    """Cut the segments of a row, sorted by number of keys and queries, into the calls that take the least time in all.

    Args:
        queries: ``[S]`` number of tokens of each segment.
        keys: ``[S]`` number of tokens that its last token sees.
        costs: of a layer.
    """
    order = np.lexsort((queries, keys))
    queries, keys = queries[order], keys[order]

    def times(first: Numbers, last: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the times of calls of the segments ``first[i]`` to ``last - 1``: as whole paths, and under a mask."""
        count, most = last - first, int(keys[last - 1])
        # The most queries of each range first..last-1.
        longest = np.maximum.accumulate(queries[:last][::-1])[::-1][first]
        return costs.unmasked_paths(count, most), costs.queries_by_keys(count, longest, most)

    chosen: list[ChosenCall] = []
    total = 0.0
    for first, last in cheapest_parts(len(order), lambda first, last: np.minimum(*times(first, last))):
        unmasked, masked = (float(time[0]) for time in times(np.array([first]), last))
        chosen.append(ChosenCall(order[first:last], unmasked <= masked))
        total += min(unmasked, masked)
    return ChosenCalls(chosen, total)


def calls(segments: Segments, costs: Costs) -> Calls:
    """Return the attention calls that run the segments in the least time by ``costs``, as index tensors."""
    flat, begin = np.concatenate(segments.paths), np.cumsum(segments.keys) - segments.keys
    output = np.empty(int(segments.queries.sum()), np.int64)
    shapes: list[CallShape] = []
    parts: tuple[list[Numbers], ...] = ([], [], [], [])  # of the four index tensors of all calls
    before = 0
    for chosen, causal in cheapest_calls(segments.queries, segments.keys, costs).calls:
        keys, own = segments.keys[chosen], segments.queries[chosen]
        queries, width = (keys if causal else own), int(keys.max())
        height = int(queries.max())
        key = flat[begin[chosen][:, None] + np.minimum(np.arange(width), keys[:, None] - 1)]  # [N, K]
        query = key if causal else segments.first[chosen][:, None] + np.minimum(np.arange(height), own[:, None] - 1)
        # The tokens of each segment, and the places of their results: the last `own` of its queries.
        inside = np.arange(int(own.sum())) - np.repeat(np.cumsum(own) - own, own)
        place = before + np.arange(len(chosen)) * height + (queries - own)
        output[np.repeat(segments.first[chosen], own) + inside] = np.repeat(place, own) + inside
        shapes.append(CallShape(len(chosen), height, width, causal))
        for part, values in zip(parts, (query.ravel(), key.ravel(), queries, keys), strict=True):
            part.append(values)
        before += query.size
    return Calls(tuple(shapes), *map(torch.from_numpy, [*map(np.concatenate, parts), output]))


# -- On a GPU: one call ------------------------------------------------------------------------------------------------


def varlen_segments(segments: Segments) -> VarlenSegments:
    """Return the bounds and keys of a variable-length call, in preorder."""

    def bounds(sizes: Numbers) -> Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))

    queries, keys = segments.queries, segments.keys
    index = np.concatenate(segments.paths)
    # Where nothing is shared every segment is its own path, and no key need be gathered.
    is_unshared = len(index) == int(queries.sum()) and bool((index == np.arange(len(index))).all())
    return VarlenSegments(
        bounds(queries),
        bounds(keys),
        int(queries.max()),
        int(keys.max()),
        int((queries * keys).sum()),
        None if is_unshared else torch.from_numpy(index),
    )
