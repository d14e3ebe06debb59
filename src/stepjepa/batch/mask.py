"""Attention masks of rows of prefix trees: one rule over two integers a token, in each form that attention takes.

The forms are a dense mask, blocks for FlexAttention, and the segments of a row (see ``segments``), which need no mask.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["mask", "calls", "varlen", "cheapest"]
"""The form of attention on trees: a mask of the whole row, a few calls of segments, one variable-length call, or the
faster one of mask and calls for each micro-batch."""

BLOCK = 128
"""Number of queries, and of keys, in a block of FlexAttention."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) -> whether the query may see the key; broadcasts."""


class CallShape(NamedTuple):
    """One call: N segments, padded to Q queries and K keys. ``causal``: the queries are whole paths, and Q is K."""

    segments: int
    queries: int
    keys: int
    causal: bool


class Call(NamedTuple):
    """The index tensors of one call: views of those of :class:`Calls`."""

    shape: CallShape
    query: Tensor  # [N, Q] column of each query
    key: Tensor  # [N, K] column of each key
    query_count: Tensor  # [N] queries without padding
    key_count: Tensor  # [N] keys without padding


@dataclass(frozen=True)
class Calls:
    """The calls of attention of one row of T tokens; index tensors hold the calls behind each other.

    A padded query repeats the segment's last one, so it sees a key under any window; nothing reads its result.
    """

    shapes: tuple[CallShape, ...]
    query_index: Tensor  # [sum N Q] column of each query
    key_index: Tensor  # [sum N K] column of each key
    query_count: Tensor  # [S] tokens of each segment, without padding; of its whole path in a causal call
    key_count: Tensor  # [S] tokens of its path, without padding
    output_index: Tensor  # [T] place of each token's result among all queries

    @property
    def scores(self) -> int:
        """Number of queries against keys that are computed, padding included."""
        return sum(shape.segments * shape.queries * shape.keys for shape in self.shapes)

    def split(self) -> Iterator[Call]:
        """Yield the calls in order."""
        numbers = [shape.segments for shape in self.shapes]
        queries = self.query_index.split([shape.segments * shape.queries for shape in self.shapes])
        keys = self.key_index.split([shape.segments * shape.keys for shape in self.shapes])
        counts = zip(self.query_count.split(numbers), self.key_count.split(numbers), strict=True)
        for shape, query, key, count in zip(self.shapes, queries, keys, counts, strict=True):
            yield Call(shape, query.view(shape.segments, -1), key.view(shape.segments, -1), *count)


@dataclass(frozen=True)
class CallShapes:
    """The shapes of calls as a value of a batch; no sequence, so that libraries copy it to no device."""

    shapes: tuple[CallShape, ...]


class VarlenSegments(NamedTuple):
    """All segments of a row as one variable-length call; the queries of all segments are the row itself."""

    query_bounds: Tensor  # [S + 1] int32: where the queries of each segment begin, and T
    key_bounds: Tensor  # [S + 1] int32: the same in ``key_index``
    most_queries: int
    most_keys: int
    scores: int  # queries against keys
    key_index: Tensor | None = None  # [sum of keys] columns of the keys of each segment; None: those of the row itself

    def to(self, device: torch.device) -> Self:
        """Return a copy with its tensors on a device."""
        return self._replace(
            query_bounds=self.query_bounds.to(device),
            key_bounds=self.key_bounds.to(device),
            key_index=None if self.key_index is None else self.key_index.to(device),
        )


class Trees(NamedTuple):
    """The prefix trees of a batch of R rows of T tokens, as int64 tensors ``[R, T]``, see ``pack.Rows``."""

    start: Tensor
    end: Tensor
    position_ids: Tensor  # for rules that count distance, such as sliding windows
    isolates: bool = False  # some `start` is not 0
    segments: Calls | VarlenSegments | None = None  # of a single row whose attention runs by segments


def tree_rule(trees: Trees) -> Rule:
    """Return the rule ``start[q] <= k <= q < end[k]`` over columns of the row: a ``mask_mod`` of FlexAttention."""
    start, end = trees.start, trees.end
    if not trees.isolates:
        return lambda batch, head, query, key: (key <= query) & (query < end[batch, key])
    return lambda batch, head, query, key: (start[batch, query] <= key) & (key <= query) & (query < end[batch, key])


def combined_rule(rule: Rule, trees: Trees) -> Rule:
    """Return the trees' rule combined with the model's rule over positions, such as a sliding window."""
    tree, position = tree_rule(trees), trees.position_ids
    return lambda batch, head, query, key: (
        tree(batch, head, query, key) & rule(batch, head, position[batch, query], position[batch, key])
    )


def dense(trees: Trees, rule: Rule | None = None) -> Tensor:
    """Mask ``[R, 1, T, T]``, bool: whether the query (dim 2) sees the key (dim 3) by the trees and the model's rule.

    ``rule`` None stands for ordinary causal attention, which the rule of the trees implies.
    """
    rows, length = trees.start.shape
    column = torch.arange(length, device=trees.start.device)
    batch = torch.arange(rows, device=column.device)[:, None, None, None]
    head = torch.zeros((), dtype=torch.long, device=column.device)
    combined = tree_rule(trees) if rule is None else combined_rule(rule, trees)
    return combined(batch, head, column[:, None], column)


def padded(trees: Trees, length: int) -> Trees:
    """Right-pad rows to ``length`` with tokens that neither see nor are seen by real tokens."""
    more = length - trees.start.shape[1]
    if not more:
        return trees
    end = F.pad(trees.end, (0, more), value=length)
    # Every old `end` is at most the old length, so the new padding sees none of the old tokens.
    return Trees(F.pad(trees.start, (0, more)), end, F.pad(trees.position_ids, (0, more)), trees.isolates)


def static_length(length: int) -> int:
    """Round a length up to a whole number of blocks, eight sizes per doubling: kernels are compiled for each size."""
    step = max(BLOCK, (1 << (length.bit_length() - 1)) // 8)
    return -(-length // step) * step


class Blocks(NamedTuple):
    """Visibility of key block j from query block i, ``[R, N, N]`` bool each; a block in neither mask is hidden."""

    partial: Tensor  # some queries of block i may see some keys of block j
    full: Tensor  # every query of block i sees every key of block j


def blocks(trees: Trees, *, exact: bool) -> Blocks:
    """Compute block visibility from the trees alone; the row length must be a multiple of :data:`BLOCK`.

    A query sees an earlier key exactly if the key's subtree ends after the query. So block i > j sees block j partly if
    the largest end in j is after the first query of i, and fully if the smallest end in j is after the last query of i.
    ``exact`` False means that something else hides keys (isolation, or the model's rule): no block is full then.
    """
    end = trees.end.unflatten(1, (-1, BLOCK))  # [R, N, BLOCK]
    first = torch.arange(end.shape[1], device=end.device) * BLOCK
    before = first[:, None] > first
    partial = (end.amax(2)[:, None, :] > first[:, None]) & before  # [R, query, key]
    full = (end.amin(2)[:, None, :] > first[:, None] + BLOCK - 1) & before & exact
    itself = torch.eye(len(first), dtype=torch.bool, device=end.device)
    return Blocks((partial & ~full) | itself, full)
