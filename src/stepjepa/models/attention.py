"""Bring the forest's visibility into the attention of any model built on transformers' attention interface.

Two attention implementations are registered, ``forest_sdpa`` and ``forest_eager``. They compute what ``sdpa`` and
``eager`` compute; their mask is the model's own mask rule (causal, sliding window, chunked), with distances counted in
``position_ids``, and the visibility of the forest. Outside :func:`forest_visibility` they behave as the originals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from stepjepa.forests.masks import Visibility, visible
from stepjepa.models.architecture import why_no_forest

SDPA, EAGER = "forest_sdpa", "forest_eager"


class _Current:
    """The visibility of the forward pass under way, its mask built once and shared by all layers."""

    def __init__(self, visibility: Visibility) -> None:
        self.visibility = visibility
        self._visible: Tensor | None = None

    def mask(self, rule: Callable[..., Tensor]) -> Tensor:
        """``[B, 1, T, T]`` bool: the forest's visibility and the model's own rule."""
        if self._visible is None:
            self._visible = visible(self.visibility)[:, None]
        if rule is causal_mask_function:
            # Whatever a forest shows is at an earlier position, so this rule takes nothing away.
            return self._visible
        position = self.visibility.position_ids
        batch = torch.arange(position.shape[0], device=position.device)[:, None, None, None]
        heads = torch.zeros((), dtype=torch.long, device=position.device)
        return self._visible & rule(batch, heads, position[:, None, :, None], position[:, None, None, :])


_current: ContextVar[_Current | None] = ContextVar("forest_visibility", default=None)


@contextmanager
def forest_visibility(visibility: Visibility | None) -> Iterator[None]:
    """Let the forward passes inside the block see by this visibility; with None they are ordinary ones.

    The model must have been prepared by :func:`enable_forest`, its ``attention_mask`` must be all ones (so that
    transformers does not read sequence boundaries out of the position ids) and its ``position_ids`` the forest's.
    """
    token = _current.set(None if visibility is None else _Current(visibility))
    try:
        yield
    finally:
        _current.reset(token)


def _forest_sdpa_mask(
    *args: Any,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Any:
    current = _current.get()
    if current is None:
        return sdpa_mask(*args, mask_function=mask_function, dtype=dtype, **kwargs)
    # Torch would turn a boolean mask into such numbers in every layer, and keep them for each until the backward pass.
    allowed = current.mask(mask_function)
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def _forest_sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    if attention_mask is not None and attention_mask.is_floating_point():
        # Numbers must have the dtype of what they are added to, which need not be the model's.
        attention_mask = attention_mask.to(query.dtype)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _forest_eager_mask(
    *args: Any,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Any:
    current = _current.get()
    if current is None:
        return eager_mask(*args, mask_function=mask_function, dtype=dtype, **kwargs)
    allowed = current.mask(mask_function)
    # A boolean mask would be added to the scores as 0 and 1 by eager attention: silently wrong.
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _forest_eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Each model file has an eager attention of its own, with its own soft caps and sinks.
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


AttentionInterface.register(SDPA, _forest_sdpa_attention)
AttentionMaskInterface.register(SDPA, _forest_sdpa_mask)
AttentionInterface.register(EAGER, _forest_eager_attention)
AttentionMaskInterface.register(EAGER, _forest_eager_mask)


def enable_forest(model: PreTrainedModel) -> None:
    """Switch a model to the registered implementation that suits it: sdpa, or eager where it refuses sdpa.

    Raises:
        ValueError: the model's layers can't run a forest.
    """
    reason = why_no_forest(model)
    if reason is not None:
        raise ValueError(f"{reason}; use encoding 'rows'")
    eager = not getattr(model, "_supports_sdpa", False) or model.config._attn_implementation == "eager"
    model.set_attn_implementation(EAGER if eager else SDPA)
