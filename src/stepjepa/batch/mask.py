"""Attention masks of rows of prefix trees: one rule over two integers a token, in each form that attention takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Number of queries, and of keys, in a block of FlexAttention."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) -> whether the query may see the key; broadcasts."""


class Trees(NamedTuple):
    """The prefix trees of a batch of R rows of T tokens, as int64 tensors ``[R, T]``, see ``pack.Rows``."""

    start: Tensor
    end: Tensor
    position_ids: Tensor  # for rules that count distance, such as sliding windows
    isolates: bool = False  # some `start` is not 0


def sees(trees: Trees) -> Rule:
    """The rule ``start[q] <= k <= q < end[k]`` over columns of the row; FlexAttention calls it a ``mask_mod``."""
    start, end = trees.start, trees.end
    if not trees.isolates:
        return lambda batch, head, query, key: (key <= query) & (query < end[batch, key])
    return lambda batch, head, query, key: (start[batch, query] <= key) & (key <= query) & (query < end[batch, key])


def under(rule: Rule, trees: Trees) -> Rule:
    """Combine the trees' rule with the model's rule over positions, such as a sliding window."""
    tree, position = sees(trees), trees.position_ids
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
    combined = sees(trees) if rule is None else under(rule, trees)
    return combined(batch, head, column[:, None], column)


def padded(trees: Trees, length: int) -> Trees:
    """Right-pad rows with tokens that neither see nor are seen by real tokens."""
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
    own = torch.eye(len(first), dtype=torch.bool, device=end.device)
    return Blocks((partial & ~full) | own, full)
