"""Attention on prefix trees by segments, as one variable-length call of FlashAttention, for GPUs.

It computes exactly what attention under the mask of the whole row does, see ``batch/segments.py``: no mask, no padding,
nothing compiled. FlashAttention takes 16 bits; anything else runs as a call for each segment, which is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from stepjepa.batch.mask import Rule, VarlenSegments

HALF = (torch.bfloat16, torch.float16)
"""Dtypes in which FlashAttention computes."""


class VarlenMask:
    """The mask argument of layers whose attention is one variable-length call; ``rule`` is the model's own.

    It is no tensor, so libraries pass it on as it is; a layer on another device asks for its copy there.
    """

    def __init__(self, positions: Tensor, segments: VarlenSegments, rule: Rule | None) -> None:
        self.positions, self.segments, self.rule = positions, segments, rule
        self._windows: dict[int, int | None] = {}  # results of :meth:`window`, which every layer asks for
        self._copies: dict[torch.device, VarlenMask] = {}

    def on(self, device: torch.device) -> VarlenMask:
        """Return the mask with its tensors on the device of a layer, for models spread over several devices."""
        if device == self.positions.device:
            return self
        if device not in self._copies:
            self._copies[device] = VarlenMask(self.positions.to(device), self.segments.to(device), self.rule)
        return self._copies[device]

    def window(self, wanted: int | None) -> int | None:
        """Return the most keys that a query sees, itself included: -1 for all, None if the rule is no sliding window.

        ``wanted`` is the window that the layer names; None if it names none.
        """
        if self.rule is None:
            return -1
        if wanted is None:
            return None
        if wanted not in self._windows:
            self._windows[wanted] = wanted if _is_window(self.rule, wanted) else None
        return self._windows[wanted]


def _is_window(rule: Rule, size: int) -> bool:
    """Return whether a rule shows a query, of the keys up to itself, the last ``size`` ones."""
    with torch.device("cpu"):
        # One query alone may stand at the end of a chunk of this size.
        zero, query, key = torch.tensor(0), torch.tensor([[2 * size], [2 * size + 1]]), torch.arange(2 * size + 2)
        try:
            visible = rule(zero, zero, query, key)
        except (RuntimeError, IndexError):  # it reads tensors of another device, as chunks do
            return False
        return bool(((visible == (query - key < size)) | (key > query)).all())


_refused: ContextVar[list[str] | None] = ContextVar("refused", default=None)


@contextmanager
def refusals() -> Iterator[list[str]]:
    """Collect the reasons why FlashAttention can't compute attention inside the block, on any device, in any dtype."""
    reasons: list[str] = []
    token = _refused.set(reasons)
    try:
        yield reasons
    finally:
        _refused.reset(token)


def varlen_forward(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VarlenMask,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention on one row as one variable-length call, with the signature that transformers calls.

    What FlashAttention can't compute (float32, chunks, dropout, e above d, on a CPU) runs as a call for each segment.

    Args:
        query: ``[1, H, T, d]``.
        key: ``[1, G, T, d]``, H a multiple of G.
        value: ``[1, G, T, e]``.
        attention_mask: the segments of the row.
        scaling: factor of the scores; None for ``1 / sqrt(d)``.
        dropout: of the attention weights.
        sliding_window: the layer's window in tokens; None for none.

    Returns:
        ``[1, T, H, e]``, and None in place of attention weights.
    """
    if torch.amp.is_autocast_available(device := query.device.type) and torch.is_autocast_enabled(device):
        # Autocast converts the arguments of torch's own attention, but not those of what FlashAttention calls.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = attention_mask.on(query.device)
    window, size, of_value = mask.window(sliding_window), key.shape[3], value.shape[3]
    reason = _refusal(window, size, of_value, dropout)
    if reason is not None and (reasons := _refused.get()) is not None:
        reasons.append(reason)
    if window is None or reason is not None or not _runs_flash(query):
        return segment_by_segment(query, key, value, mask, scaling=scaling, dropout=dropout), None
    # FlashAttention has one size of heads.
    value = F.pad(value, (0, size - of_value)) if of_value < size else value
    call = VarlenCall(mask.segments, size**-0.5 if scaling is None else scaling, window)
    arguments = *(_by_token(projection) for projection in (query, key, value)), call
    output: Tensor = _Varlen.apply(*arguments)  # type: ignore[no-untyped-call]  # torch does not type it
    # A view of a part could not be viewed as ``[1, T, H * e]`` by the model.
    return output[None, :, :, :of_value].contiguous(), None


def _by_token(states: Tensor) -> Tensor:
    """Reshape states ``[1, H, T, d]`` to ``[T, H, d]``; FlashAttention needs the numbers of a head side by side."""
    states = states if states.stride(3) == 1 else states.contiguous()
    return states[0].transpose(0, 1)


def _runs_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in HALF


def _refusal(window: int | None, size: int, of_value: int, dropout: float) -> str | None:
    """Return why FlashAttention has no variable-length call for a layer; None if it has one.

    Args:
        window: of :meth:`VarlenMask.window`.
        size: width of a head of queries and keys.
        of_value: width of a head of values.
        dropout: probability of dropping an attention weight.
    """
    if window is None:
        return "its rule is no sliding window"
    # Of its backward passes, that for heads of 193 to 224 runs on a few cards alone.
    if size > 256 or 192 < size <= 224 or size % 8 or of_value > size:
        return f"heads of {size} for keys and {of_value} for values"
    return f"dropout of {dropout}" if dropout else None


class VarlenCall(NamedTuple):
    """The arguments of a variable-length call beside its tensors."""

    segments: VarlenSegments
    scale: float
    window: int  # most keys that a query sees, itself included; -1 for all

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """The kernel's bounds, longest segment and path, dropout, and whether it is causal without a window."""
        segments = self.segments
        return (
            segments.query_bounds,
            segments.key_bounds,
            segments.most_queries,
            segments.most_keys,
            0.0,
            self.window < 0,
        )

    @property
    def named(self) -> dict[str, float]:
        """The kernel's scale and window: the number of keys before each query, which is aligned at the end."""
        return {
            "scale": self.scale,
            "window_size_left": self.window - 1 if self.window > 0 else -1,
            "window_size_right": 0,
        }


def flash_forward(query: Tensor, keys: Tensor, values: Tensor, call: VarlenCall) -> tuple[Tensor, ...]:
    """Run FlashAttention's kernel.

    Args:
        query: ``[T, H, d]``.
        keys: ``[M, G, d]``, those of each segment behind each other.
        values: ``[M, G, d]``, in the same order.
        call: bounds of the segments, scale and window.

    Returns:
        The output ``[T, H, d]``, and three tensors that the backward pass needs.
    """
    kernel = torch.ops.aten._flash_attention_forward
    output: tuple[Tensor, ...] = kernel(query, keys, values, *call.arguments, False, **call.named)
    return output[:4]


def flash_backward(gradient: Tensor, saved: tuple[Tensor, ...], call: VarlenCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query ``[T, H, d]``, keys and values ``[M, G, d]``.

    Args:
        gradient: ``[T, H, d]``, of the output.
        saved: the tensors that :func:`flash_forward` was called with, and those that it returned.
        call: that of the forward pass.
    """
    *tensors, state, unused = saved
    kernel = torch.ops.aten._flash_attention_backward
    gradients: tuple[Tensor, Tensor, Tensor] = kernel(gradient, *tensors, *call.arguments, state, unused, **call.named)
    return gradients


class _Varlen(Function):
    """Attention of the queries of each segment to the keys of its path, as ``torch.nn.attention.varlen`` does it.

    Torch's function takes gathered keys and keeps them until the backward pass. Here they are gathered twice instead,
    which saves memory, and the kernel, which every layer calls, is reached with less overhead in Python.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall) -> Tensor:
        """Attend with queries ``[T, H, d]`` to keys and values ``[T, G, d]``; segments follow each other in the row."""
        index = call.segments.key_index
        output, *states = flash_forward(query, _gathered(key, index), _gathered(value, index), call)
        ctx.call = call
        ctx.save_for_backward(query, key, value, output, *states)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *result = ctx.saved_tensors
        index = ctx.call.segments.key_index
        saved = query, _gathered(key, index), _gathered(value, index), *result
        of_query, of_keys, of_values = flash_backward(gradient.contiguous(), saved, ctx.call)
        return of_query, _summed(of_keys, index, key), _summed(of_values, index, value), None


def _gathered(states: Tensor, index: Tensor | None) -> Tensor:
    return states if index is None else states.index_select(0, index)


def _summed(gradient: Tensor, index: Tensor | None, states: Tensor) -> Tensor:
    """Sum the gradient of gathered states to that of states ``[T, G, d]``, in float32: 16 bits would round it often."""
    if index is None:
        return gradient
    summed = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
    return summed.index_add_(0, index, gradient.float()).to(states.dtype)


def segment_by_segment(
    query: Tensor, key: Tensor, value: Tensor, mask: VarlenMask, *, scaling: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute attention of one segment after the other, to ``[1, T, H, e]``; arguments as in :func:`varlen_forward`."""
    segments, results, zero = mask.segments, [], torch.zeros((), dtype=torch.long, device=query.device)
    bounds, key_bounds = segments.query_bounds.tolist(), segments.key_bounds.tolist()
    columns = torch.arange(query.shape[2], device=query.device) if segments.key_index is None else segments.key_index
    for first, last, begin, end in zip(bounds, bounds[1:], key_bounds, key_bounds[1:], strict=False):
        index = columns[begin:end]
        number, count = last - first, len(index)
        place = torch.arange(count, device=query.device)
        visible = place <= place[count - number :, None]
        if mask.rule is not None:
            at_query, at_key = mask.positions[first:last, None], mask.positions[index]
            visible = visible & mask.rule(zero, zero, at_query, at_key)
        result = F.scaled_dot_product_attention(
            query[:, :, first:last],
            key[:, :, index],
            value[:, :, index],
            attn_mask=visible,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        results.append(result.transpose(1, 2))
    return torch.cat(results, 1)
