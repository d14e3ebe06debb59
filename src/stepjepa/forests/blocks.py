"""Who may see whom in a batch of forests, in blocks of tokens: what attention may skip, and what it need not check.

Works on the integers of ``masks.Visibility`` alone, on their device and without waiting for it; no array of tokens by
tokens is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepjepa.forests.masks import Visibility

BLOCK = 128
"""Tokens of a block, queries and keys alike: what FlexAttention takes by default."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) -> whether the query may see the key; broadcasts."""


class Blocks(NamedTuple):
    """What is seen, block by block; what is in neither is seen nowhere.

    Attributes:
        partial: ``[B, N, N]`` bool, some queries of block i see some keys of block j.
        full: ``[B, N, N]`` bool, all of them see all; never where a block juts out of the row.
    """

    partial: Tensor
    full: Tensor


def static_length(length: int) -> int:
    """The next of few lengths, for kernels that are compiled for one length at a time.

    Lengths are multiples of :data:`BLOCK`, and above 2048 of an eighth of the power of two below: eight to a doubling,
    so that rows grow by an eighth at most, or by less than a block.

    Args:
        length: T, 1 or more.
    """
    step = max(BLOCK, (1 << (length.bit_length() - 1)) // 8)
    return -(-length // step) * step


def padded(visibility: Visibility, length: int) -> Visibility:
    """The visibility of rows made longer by a segment that nothing else sees and that sees nothing else.

    Args:
        visibility: of rows of T tokens.
        length: T or more.
    """
    segment, offset, seen, position = visibility
    more = length - segment.shape[1]
    if not more:
        return visibility
    ramp = torch.arange(more, dtype=offset.dtype, device=offset.device).expand(len(offset), -1)
    segment = F.pad(segment, (0, more), value=seen.shape[1])
    return Visibility(segment, torch.cat([offset, ramp], 1), F.pad(seen, (0, 1, 0, 1)), F.pad(position, (0, more)))


def visible_blocks(visibility: Visibility) -> Blocks:
    """The blocks of what a batch of forests shows, by comparing the ends of pieces.

    A piece is the part of one segment that lies in one block. Within it places in the segment ascend by one, so that of
    two pieces the first and the last tokens tell whether some pair is visible, and whether all are.
    """
    segment, offset, seen, _ = visibility
    rows, length = segment.shape
    count = -(-length // BLOCK)
    column = torch.arange(length, device=segment.device)
    begins = (column % BLOCK == 0) | (segment != segment.roll(1, dims=1))
    piece = begins.cumsum(1) - 1  # [B, T]
    # No row has more: a piece begins with a block or with a segment.
    shape = (rows, count + seen.shape[1])
    first = offset.new_full(shape, length).scatter_reduce(1, piece, offset, "amin")
    last = offset.new_full(shape, -1).scatter_reduce(1, piece, offset, "amax")
    owner = segment.new_zeros(shape).scatter(1, piece, segment)
    block = segment.new_full(shape, count).scatter(1, piece, (column // BLOCK).expand(rows, -1))

    limit = seen[torch.arange(rows, device=seen.device)[:, None, None], owner[:, :, None], owner[:, None, :]]
    same = owner[:, :, None] == owner[:, None, :]
    some = (same & (first[:, None, :] <= last[:, :, None])) | (first[:, None, :] < limit)  # [B, query, key]
    whole = (same & (last[:, None, :] <= first[:, :, None])) | (last[:, None, :] < limit)
    # Pieces that are not there belong to a block behind the last, which is cut off.
    place = (block[:, :, None] * (count + 1) + block[:, None, :]).flatten(1)

    def reduced(values: Tensor) -> Tensor:
        found = values.new_zeros((rows, (count + 1) ** 2), dtype=torch.int32)
        found.scatter_reduce_(1, place, values.flatten(1).int(), "amax")
        return found.view(rows, count + 1, count + 1)[:, :count, :count] > 0

    seen_some = reduced(some)
    inside = torch.arange(1, count + 1, device=segment.device) * BLOCK <= length
    full = seen_some & ~reduced(~whole) & inside[:, None] & inside
    return Blocks(seen_some & ~full, full)


def evaluated_blocks(rule: Rule, rows: int, length: int, device: torch.device) -> Blocks:
    """The blocks of any rule, evaluated for every pair of tokens, a block of queries at a time.

    Args:
        rule: over places in the row.
        rows: B.
        length: T.
        device: that of the rule's tensors.
    """
    count = -(-length // BLOCK)
    batch = torch.arange(rows, device=device)[:, None, None, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    key = torch.arange(length, device=device)[None, None, None, :]
    partial, full = [], []
    for start in range(0, length, BLOCK):
        query = torch.arange(start, min(start + BLOCK, length), device=device)[None, None, :, None]
        allowed = rule(batch, head, query, key).expand(rows, 1, query.numel(), length)[:, 0]
        allowed = F.pad(allowed, (0, count * BLOCK - length))
        tiles = allowed.unflatten(2, (count, BLOCK))  # [B, q, N, BLOCK]
        whole = tiles.all(3).all(1) & (query.numel() == BLOCK)
        partial.append(tiles.any(3).any(1) & ~whole)
        full.append(whole)
    return Blocks(torch.stack(partial, 1), torch.stack(full, 1))
