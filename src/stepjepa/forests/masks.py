"""Who may see whom in a batch of forests, as tensors: the fast form of ``forest.key_ranges``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepjepa.forests.forest import Forest, seen_lengths


class Visibility(NamedTuple):
    """The visibility of a batch as small integer tensors, from which any mask can be built.

    Attributes:
        segment_ids: ``[B, T]`` int64, the segment of each token; padding has a segment of its own.
        offsets: ``[B, T]`` int64, place of each token in its segment.
        seen_lengths: ``[B, S, S]`` int64, how many tokens of segment ``j`` the tokens of segment ``i`` see.
        position_ids: ``[B, T]`` int64, for rules that count distance, such as sliding windows.
    """

    segment_ids: Tensor
    offsets: Tensor
    seen_lengths: Tensor
    position_ids: Tensor


def causal_in_segment(visibility: Visibility) -> Tensor:
    """``[B, T, T]`` bool: query and key are in one segment, the key not behind the query."""
    segment, offset = visibility.segment_ids, visibility.offsets
    return (segment[:, :, None] == segment[:, None, :]) & (offset[:, None, :] <= offset[:, :, None])


def seen_in_ancestor(visibility: Visibility) -> Tensor:
    """``[B, T, T]`` bool: the key is in a segment that the query's segment hangs on, before the attachment."""
    segment = visibility.segment_ids
    length = segment.shape[1]
    # On rows of tens of thousands of tokens, this is the largest tensor there is.
    small = torch.int16 if length <= torch.iinfo(torch.int16).max else torch.int32
    rows = torch.arange(segment.shape[0], device=segment.device)[:, None]
    per_query = visibility.seen_lengths.to(small)[rows, segment]  # [B, T, S]
    limit = per_query.gather(2, segment[:, None, :].expand(-1, length, -1))  # [B, T, T]
    return visibility.offsets.to(small)[:, None, :] < limit


def visible(visibility: Visibility) -> Tensor:
    """``[B, T, T]`` bool: the query (dim 1) may see the key (dim 2)."""
    return causal_in_segment(visibility) | seen_in_ancestor(visibility)


def batch_visibility(forests: Sequence[Forest], length: int) -> Visibility:
    """The visibility of forests padded on the right to a common length.

    Args:
        forests: one per row.
        length: T, at least the longest forest.
    """
    count = max(len(forest.segments) for forest in forests) + 1
    segment_ids = np.full((len(forests), length), count - 1, np.int64)
    offsets = np.zeros((len(forests), length), np.int64)
    positions = np.zeros((len(forests), length), np.int64)
    seen = np.zeros((len(forests), count, count), np.int64)
    ramp = np.arange(length)
    for row, forest in enumerate(forests):
        for index, segment in enumerate(forest.segments):
            segment_ids[row, segment.start : segment.end] = index
            offsets[row, segment.start : segment.end] = ramp[: len(segment)]
        # Padding is causal in a segment of its own, so that no query is left without a key (softmax of nothing).
        offsets[row, len(forest) :] = ramp[: length - len(forest)]
        positions[row, : len(forest)] = forest.position_ids
        size = len(forest.segments)
        seen[row, :size, :size] = seen_lengths(forest.segments)
    return Visibility(*(torch.from_numpy(array) for array in (segment_ids, offsets, seen, positions)))
