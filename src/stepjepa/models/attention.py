"""Bring the forest's visibility into the attention of any model built on transformers' attention interface.

Registered are ``forest_sdpa``, ``forest_eager`` and ``forest_flex``. They compute what ``sdpa``, ``eager`` and
``flex_attention`` compute; their mask is the model's own mask rule (causal, sliding window, chunked), with distances
counted in ``position_ids``, and the visibility of the forest. Outside :func:`forest_visibility` they behave as the
originals, but for ``forest_flex``: plain rows need no block mask, and are run by sdpa, or by eager attention where the
model refuses sdpa (``forest_flex_unfused``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from stepjepa.forests.masks import Visibility, visible
from stepjepa.models.architecture import why_no_forest
from stepjepa.models.flex import block_mask, flex_forward, uses_flex
from stepjepa.models.pieces import Pieces, attend, cut

SDPA, EAGER = "forest_sdpa", "forest_eager"
FLEX, FLEX_UNFUSED = "forest_flex", "forest_flex_unfused"


class _Current:
    """The visibility of the forward pass under way, its mask built once and shared by all layers."""

    def __init__(self, visibility: Visibility) -> None:
        self.visibility = visibility
        self._visible: Tensor | None = None

    @cached_property
    def pieces(self) -> Pieces | None:
        """The batch in pieces where attention without a mask is cheaper, see ``pieces.cut``."""
        return cut(self.visibility)

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
    # Whatever a forest shows is at an earlier position, so this rule takes nothing away.
    if mask_function is causal_mask_function and current.pieces is not None:
        return current.pieces
    # Torch would turn a boolean mask into such numbers in every layer, and keep them for each until the backward pass.
    allowed = current.mask(mask_function)
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def _forest_sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Pieces | None, **kwargs: Any
) -> Any:
    if isinstance(attention_mask, Pieces):
        return attend(module, query, key, value, attention_mask, **kwargs)
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


def _register_flex(name: str, plain_mask: Callable[..., Any], plain_attention: Callable[..., Any]) -> None:
    def mask(*args: Any, mask_function: Callable[..., Tensor] = causal_mask_function, **kwargs: Any) -> Any:
        current = _current.get()
        if current is None:
            return plain_mask(*args, mask_function=mask_function, **kwargs)
        return block_mask(current.visibility, mask_function)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        forward = flex_forward if isinstance(attention_mask, BlockMask) else plain_attention
        return forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


AttentionInterface.register(SDPA, _forest_sdpa_attention)
AttentionMaskInterface.register(SDPA, _forest_sdpa_mask)
AttentionInterface.register(EAGER, _forest_eager_attention)
AttentionMaskInterface.register(EAGER, _forest_eager_mask)
_register_flex(FLEX, sdpa_mask, sdpa_attention_forward)
_register_flex(FLEX_UNFUSED, eager_mask, _forest_eager_attention)


def enable_forest(model: PreTrainedModel) -> None:
    """Switch a model to the registered implementation that suits it.

    That is FlexAttention where it was loaded with that, otherwise sdpa, or eager where the model refuses sdpa.

    Raises:
        ValueError: the model's layers can't run a forest.
    """
    reason = why_no_forest(model)
    if reason is not None:
        raise ValueError(f"{reason}; use encoding 'rows'")
    sdpa = getattr(model, "_supports_sdpa", False)
    if uses_flex(model):
        # Releases of transformers in which Gemma-2 takes sdpa leave its soft cap out there; FlexAttention has it.
        caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        model.set_attn_implementation(FLEX if sdpa and not caps else FLEX_UNFUSED)
        return
    eager = not sdpa or model.config._attn_implementation == "eager"
    model.set_attn_implementation(EAGER if eager else SDPA)
