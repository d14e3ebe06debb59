"""Attention on prefix trees by segments, as a few fused calls, for CPUs.

It computes exactly what attention under the mask of the whole row does, see ``batch/segments.py``. A rule of the model
(sliding window, chunks) is over positions, which are consecutive along a path, so it is one over the keys of a path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from stepjepa.batch.mask import Call, Calls, CallShape, Rule, Trees


class CallMask(NamedTuple):
    """The mask of one call."""

    shape: CallShape
    mask: Tensor | None  # additive, [N or 1, 1, Q, K]; None for plain causal attention


class SegmentMask:
    """The mask argument of layers whose attention runs by the segments of a row; no tensor, so libraries pass it on."""

    def __init__(self, calls: Calls, masks: list[CallMask]) -> None:
        self.calls, self._masks = calls, masks

    def of_dtype(self, dtype: torch.dtype) -> list[CallMask]:
        """Return the masks in the dtype of the queries, which autocast may change; they are converted once."""
        if any(call.mask is not None and call.mask.dtype != dtype for call in self._masks):
            self._masks = [CallMask(shape, None if mask is None else mask.to(dtype)) for shape, mask in self._masks]
        return self._masks


def segment_mask(trees: Trees, calls: Calls, rule: Rule | None, dtype: torch.dtype) -> SegmentMask:
    """Return the mask of a row that runs by calls; ``rule`` is the model's own, None for the ordinary causal one."""
    return SegmentMask(calls, [CallMask(call.shape, _call_mask(call, trees, rule, dtype)) for call in calls.split()])


def _call_mask(call: Call, trees: Trees, rule: Rule | None, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask of a call, ``[N or 1, 1, Q, K]``; None where it is the plain causal one."""
    causal, (at_query, at_key, query_count, key_count) = call.shape.causal, call[1:]
    if causal and rule is None:
        return None
    if causal and not trees.isolates:
        # All paths begin at position 0, so the longest one shows what each sees.
        path = slice(longest := int(key_count.argmax()), longest + 1)
        at_query, at_key, query_count, key_count = at_query[path], at_key[path], query_count[path], key_count[path]
    query, key = (torch.arange(indices.shape[1], device=indices.device) for indices in (at_query, at_key))
    # A padded query stands for the last one of its segment.
    query = torch.minimum(query, query_count[:, None] - 1) + (key_count - query_count)[:, None]
    allowed = key <= query[:, :, None]
    if rule is not None:
        position, zero = trees.position_ids[0], torch.zeros((), dtype=torch.long, device=at_query.device)
        in_window = rule(zero, zero, position[at_query][:, :, None], position[at_key][:, None, :])
        if causal and bool((in_window | ~allowed).all()):
            return None  # no path is as long as the window
        allowed = allowed & in_window
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)[:, None]


class _Gather(Function):
    """``states[index]`` for states ``[T, F]``; on a CPU ``index_add_`` would add its gradient up row by row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(states)
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        # In 16 bits every addition to a key that many segments share would round the sum again.
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        summed = torch.ops.aten.embedding_dense_backward(wide, index, ctx.rows, -1, False)
        return summed.to(gradient.dtype), None


def gather(states: Tensor, index: Tensor) -> Tensor:
    """Gather the rows of states ``[T, F]`` at an index ``[M]``, to ``[M, F]``."""
    gathered: Tensor = _Gather.apply(states, index)  # type: ignore[no-untyped-call]  # torch does not type it
    return gathered


def segment_forward(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SegmentMask,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention on one row by the calls of :func:`segment_mask`, with the signature that transformers calls.

    Args:
        query: ``[1, H, T, d]``.
        key: ``[1, G, T, d]``, H a multiple of G.
        value: ``[1, G, T, e]``.
        attention_mask: of :func:`segment_mask`.
        scaling: factor of the scores; None for ``1 / sqrt(d)``.
        dropout: of the attention weights.

    Returns:
        ``[1, T, H, e]``, and None in place of attention weights.
    """
    heads, groups = query.shape[1], key.shape[1]
    calls = attention_mask.calls
    queries = gather(_rows(query), calls.query_index)
    keys = gather(torch.cat([_rows(key), _rows(value)], 1), calls.key_index)
    width = groups * key.shape[3]
    masks = attention_mask.of_dtype(query.dtype)
    call_queries = queries.split([shape.segments * shape.queries for shape, _ in masks])
    call_keys = keys.split([shape.segments * shape.keys for shape, _ in masks])
    results = []
    for (shape, mask), own_queries, own_keys in zip(masks, call_queries, call_keys, strict=True):
        result = F.scaled_dot_product_attention(
            own_queries.view(shape.segments, shape.queries, heads, -1).transpose(1, 2),
            own_keys[:, :width].unflatten(0, (shape.segments, shape.keys)).unflatten(2, (groups, -1)).transpose(1, 2),
            own_keys[:, width:].unflatten(0, (shape.segments, shape.keys)).unflatten(2, (groups, -1)).transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=heads != groups,
        )
        results.append(result.transpose(1, 2).reshape(-1, heads * value.shape[3]))
    output = gather(torch.cat(results), calls.output_index)
    return output.view(1, -1, heads, value.shape[3]), None


def _rows(states: Tensor) -> Tensor:
    """Reshape ``[1, H, T, d]`` to ``[T, H * d]``; without a copy where the layer computed one row a token."""
    return states[0].transpose(0, 1).flatten(1)
