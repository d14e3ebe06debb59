"""Torch's counter of FLOPs, with formulas for the operations that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


def _attention_forward(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    batch, heads, queries, size = query
    return 2 * batch * heads * queries * key[-2] * (size + value[-1])


def _attention_backward(
    _gradient: object, query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    batch, heads, queries, size = query
    # Recomputed scores, gradients of query and key (``size`` each); gradients of probabilities and value.
    return 2 * batch * heads * queries * key[-2] * (3 * size + 2 * value[-1])


def _varlen_forward(query: Tensor, _key: Tensor, value: Tensor, *bounds: Any, **__: object) -> int:
    return _varlen_products(query, *bounds[:2]) * (query.shape[-1] + value.shape[-1])


def _varlen_backward(_gradient: Tensor, query: Tensor, _key: Tensor, value: Tensor, *more: Any, **__: object) -> int:
    # Behind the output and the state of the softmax.
    return _varlen_products(query, *more[2:4]) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _varlen_products(query: Tensor, query_bounds: Tensor, key_bounds: Tensor) -> int:
    """Return twice the (query, key) pairs of all heads and segments: queries ``[T, H, d]``, bounds ``[S + 1]``."""
    return 2 * query.shape[1] * int((query_bounds.diff().long() * key_bounds.diff().long()).sum())


# The formulas of a variable-length call are passed its arguments, not their shapes alone.
_varlen_forward._get_raw = _varlen_backward._get_raw = True  # type: ignore[attr-defined]  # as torch marks its own


def _grouped_product(first: Sequence[int], second: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of products of experts with their rows, or of the weights' gradients, sums over rows."""
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * groups * first[-2] * first[-1] * second[-1]


# Operation -> function from the shapes of its arguments to FLOPs, for operations that torch's registry lacks (the CPU's
# fused attention, products of experts) or that older versions refuse (fewer key heads than query heads).
_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _grouped_product,
    torch.ops.aten._flash_attention_forward: _varlen_forward,
    torch.ops.aten._flash_attention_backward: _varlen_backward,
}
for _kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    _FORMULAS[getattr(torch.ops.aten, f"_scaled_dot_product_{_kind}")] = _attention_forward
    _FORMULAS[getattr(torch.ops.aten, f"_scaled_dot_product_{_kind}_backward")] = _attention_backward


def counting() -> FlopCounterMode:
    """Make a context that counts the FLOPs inside by torch's counter (``get_total_flops()``).

    Kernels from outside torch (flash-attn) are not counted. Torch decomposes composite operations to count them, so
    results may differ in rounding.
    """
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)
