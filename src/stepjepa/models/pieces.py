"""Attention over long forests on a CPU: every segment by itself, with no mask and no work on what nobody sees.

A kernel with a mask works through every pair of tokens of a row, and on a row of many segments most pairs are not seen.
Here each segment's queries meet the keys that they see and no others: a root or the main text under the kernel's own
causal rule, a branch with the start of what it hangs on before its own keys. On GPUs FlexAttention does as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stepjepa.forests.masks import Visibility

CALL_COST = 40_000
"""What one more call costs on a CPU, in pairs of query and key that it must save (measured on tiny models, where it
counts most)."""


class Piece(NamedTuple):
    """A segment of a row.

    Attributes:
        start: its first token.
        end: behind its last one.
        seen: start and end of what its tokens see of other segments.
    """

    start: int
    end: int
    seen: tuple[tuple[int, int], ...]

    @property
    def keys(self) -> int:
        """How many tokens its last token sees."""
        return self.end - self.start + sum(end - start for start, end in self.seen)


class Pieces(NamedTuple):
    """A batch in pieces; stands in the place of a mask.

    Attributes:
        rows: the pieces of each row, in their order; what is behind the last one is padding.
        length: T.
        masks: by queries, keys and dtype, for pieces that see others; made once for all layers.
    """

    rows: tuple[tuple[Piece, ...], ...]
    length: int
    masks: dict[tuple[int, int, torch.dtype], Tensor]

    def mask(self, queries: int, keys: int, dtype: torch.dtype) -> Tensor | None:
        """``[1, 1, queries, keys]``, what is added to the scores of queries that see all keys before their own; None
        where a single query sees all of them."""
        if queries == 1:
            return None
        key = (queries, keys, dtype)
        if key not in self.masks:
            hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
            self.masks[key] = torch.zeros(1, 1, queries, keys, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self.masks[key]


def cut(visibility: Visibility) -> Pieces | None:
    """A batch in pieces, or None where one call with a mask is cheaper or all that there is.

    Args:
        visibility: of the batch, on the model's device.
    """
    segment_ids = visibility.segment_ids
    if segment_ids.device.type != "cpu" or isinstance(segment_ids, FakeTensor):
        return None
    rows = tuple(
        tuple(_pieces(ids, seen))
        for ids, seen in zip(segment_ids.numpy(), visibility.seen_lengths.numpy(), strict=True)
    )
    count, length = segment_ids.shape
    worked = sum((piece.end - piece.start) * piece.keys for row in rows for piece in row)
    calls = sum(map(len, rows))
    return Pieces(rows, length, {}) if count * length**2 - worked > calls * CALL_COST else None


def _pieces(ids: NDArray[np.int64], seen: NDArray[np.int64]) -> list[Piece]:
    """The pieces of a row whose tokens are in segments ``ids`` ``[T]`` that see ``seen`` ``[S, S]`` of each other."""
    bounds = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    # Padding has the last number.
    places = {int(ids[start]): (start, end) for start, end in pairwise(bounds) if ids[start] != len(seen) - 1}
    return [
        Piece(
            start,
            end,
            tuple((places[other][0], places[other][0] + int(seen[own, other])) for other in _others(seen, own)),
        )
        for own, (start, end) in places.items()
    ]


def _others(seen: NDArray[np.int64], own: int) -> list[int]:
    return [other for other in np.flatnonzero(seen[own]).tolist() if other != own]


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, **kwargs: Any) -> Any:
    """Attention as sdpa computes it under the mask that the pieces stand for.

    Args:
        module: the attention layer.
        query: ``[B, H, T, D]``.
        key: ``[B, G, T, D]``, of as many or fewer heads.
        value: likewise.
        pieces: of the batch.
        kwargs: scaling, dropout and whatever else sdpa takes.

    Returns:
        ``[B, T, H, D]``, 0 at padding, and None for the weights.
    """
    kwargs.pop("is_causal", None)
    rows = [
        _row(module, tensors, row, pieces, kwargs)
        # Split and put together again: the backward pass of slices would fill the whole row for each of them.
        for row, *tensors in zip(pieces.rows, query.split(1), key.split(1), value.split(1), strict=True)
    ]
    return torch.cat(rows), None


def _row(
    module: nn.Module, tensors: list[Tensor], row: Sequence[Piece], pieces: Pieces, kwargs: dict[str, Any]
) -> Tensor:
    sizes = [piece.end - piece.start for piece in row]
    padding = pieces.length - sum(sizes)
    queries, keys, values = (tensor.split([*sizes, padding], dim=2) for tensor in tensors)
    number_of = {piece.start: number for number, piece in enumerate(row)}
    outputs = []
    for number, piece in enumerate(row):
        query, key, value, mask = queries[number], keys[number], values[number], None
        if piece.seen:
            before = [(number_of[start], end - start) for start, end in piece.seen]
            key, value = (
                torch.cat([*(side[other][:, :, :count] for other, count in before), side[number]], dim=2)
                for side in (keys, values)
            )
            mask = pieces.mask(sizes[number], piece.keys, query.dtype)
        causal = not piece.seen
        outputs.append(sdpa_attention_forward(module, query, key, value, mask, is_causal=causal, **kwargs)[0])
    if padding:
        query, _, value = tensors
        outputs.append(query.new_zeros(1, padding, query.shape[1], value.shape[-1]))
    return torch.cat(outputs, dim=1)
