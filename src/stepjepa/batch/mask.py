"""Who sees whom in rows of prefix trees: one rule over two integers a token, in every form that attention takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Tokens of a block of FlexAttention, queries and keys alike."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) -> whether the query may see the key; broadcasts."""


class Trees(NamedTuple):
    """The integers of a batch of R rows of T tokens, each ``[R, T]`` int64, see ``pack.Rows``."""

    start: Tensor
    end: Tensor
    position_ids: Tensor  # for rules that count distance, such as sliding windows
    isolates: bool = False  # some ``start`` is not 0


def sees(trees: Trees) -> Rule:
    """The rule ``start[q] <= k <= q < end[k]`` over places in the row; what FlexAttention calls a ``mask_mod``."""
    start, end = trees.start, trees.end
    if not trees.isolates:
        return lambda batch, head, query, key: (key <= query) & (query < end[batch, key])
    return lambda batch, head, query, key: (start[batch, query] <= key) & (key <= query) & (query < end[batch, key])


def under(rule: Rule, trees: Trees) -> Rule:
    """The trees' rule and a rule of the model over positions, such as a sliding window."""
    tree, position = sees(trees), trees.position_ids
    return lambda batch, head, query, key: (
        tree(batch, head, query, key) & rule(batch, head, position[batch, query], position[batch, key])
    )


def dense(trees: Trees, rule: Rule | None = None) -> Tensor:
    """``[R, 1, T, T]`` bool: the query (dim 2) sees the key (dim 3) by the trees and the model's rule over positions.

    Without a rule the model's is the ordinary causal one, which that of the trees contains.
    """
    rows, length = trees.start.shape
    place = torch.arange(length, device=trees.start.device)
    batch = torch.arange(rows, device=place.device)[:, None, None, None]
    head = torch.zeros((), dtype=torch.long, device=place.device)
    found = sees(trees) if rule is None else under(rule, trees)
    return found(batch, head, place[:, None], place)


def padded(trees: Trees, length: int) -> Trees:
    """Rows made longer by tokens that see no token before the padding, and that none of those sees."""
    more = length - trees.start.shape[1]
    if not more:
        return trees
    end = F.pad(trees.end, (0, more), value=length)
    # What ended with the row still ends there: padding that reached to its end now reaches further, among itself.
    return Trees(F.pad(trees.start, (0, more)), end, F.pad(trees.position_ids, (0, more)), trees.isolates)


def static_length(length: int) -> int:
    """The next of few lengths, for kernels that are compiled for one at a time: eight to a doubling, whole blocks."""
    step = max(BLOCK, (1 << (length.bit_length() - 1)) // 8)
    return -(-length // step) * step


class Blocks(NamedTuple):
    """What is seen, block by block, ``[R, N, N]`` bool each; what is in neither is seen nowhere."""

    partial: Tensor  # some queries of block i may see some keys of block j
    full: Tensor  # all of them see all


def blocks(trees: Trees, *, exact: bool) -> Blocks:
    """The blocks of rows of a length that is a multiple of :data:`BLOCK`, from the integers alone.

    A query sees a key before it exactly if the key's subtree ends behind the query. So block j is seen by block i > j
    in part if the furthest end of j lies behind the first query of i, and wholly if the nearest lies behind the last.
    With ``exact`` False something else takes keys away, isolation or a rule of the model: no block counts as full.
    """
    end = trees.end.unflatten(1, (-1, BLOCK))  # [R, N, BLOCK]
    first = torch.arange(end.shape[1], device=end.device) * BLOCK
    before = first[:, None] > first
    some = (end.amax(2)[:, None, :] > first[:, None]) & before  # [R, query, key]
    full = (end.amin(2)[:, None, :] > first[:, None] + BLOCK - 1) & before & exact
    own = torch.eye(len(first), dtype=torch.bool, device=end.device)
    return Blocks((some & ~full) | own, full)
