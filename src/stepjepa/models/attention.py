"""Add the mask of prefix trees to any model that uses transformers' attention interface.

Registers ``tree_sdpa``, ``tree_eager`` and ``tree_flex``. They compute what ``sdpa``, ``eager`` and ``flex_attention``
compute, under a mask that combines the model's own rule (causal, sliding window, chunked; distances counted in
``position_ids``) with the rule of the trees. Outside :func:`tree_mask` the first two behave as the originals;
``tree_flex`` runs sdpa (plain rows need no block mask), and ``tree_flex_unfused``, for models that refuse sdpa or have
soft caps, eager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from stepjepa.batch.mask import Rule, Trees, dense
from stepjepa.models.flex import block_mask, flex_forward, uses_flex

SDPA, EAGER = "tree_sdpa", "tree_eager"
FLEX, FLEX_UNFUSED = "tree_flex", "tree_flex_unfused"

_current: ContextVar[Trees | None] = ContextVar("tree_mask", default=None)


@contextmanager
def tree_mask(trees: Trees | None) -> Iterator[None]:
    """Apply the rule of these trees to forward passes inside the block; None leaves them unchanged.

    The model must have been prepared by :func:`enable_trees`, its ``attention_mask`` must be all ones (so that
    transformers infers no sequence boundaries from the position ids), and its ``position_ids`` must be the trees'.
    """
    token = _current.set(trees)
    try:
        yield
    finally:
        _current.reset(token)


def _own_rule(mask_function: Rule) -> Rule | None:
    # The trees' rule shows a query no token at a later position, so the causal rule removes nothing.
    return None if mask_function is causal_mask_function else mask_function


def _register_dense(name: str, plain_mask: Any, attention: Any, hidden: Callable[[torch.dtype], float]) -> None:
    """Register attention under an additive mask ``[R, 1, T, T]``: 0 where a key is seen, else ``hidden(dtype)``."""

    def mask(
        *args: Any, mask_function: Rule = causal_mask_function, dtype: torch.dtype = torch.float32, **kwargs: Any
    ) -> Any:
        trees = _current.get()
        if trees is None:
            return plain_mask(*args, mask_function=mask_function, dtype=dtype, **kwargs)
        # Not a boolean mask: eager attention would add it to the scores as 0 and 1 (silently wrong), and fused
        # attention would convert it to an additive mask in every layer and keep each copy until the backward pass.
        allowed = dense(trees, _own_rule(mask_function))
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, hidden(dtype))

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def _register_flex(name: str, plain_mask: Any, plain_attention: Any) -> None:
    def mask(*args: Any, mask_function: Rule = causal_mask_function, **kwargs: Any) -> Any:
        trees = _current.get()
        if trees is None:
            return plain_mask(*args, mask_function=mask_function, **kwargs)
        return block_mask(trees, _own_rule(mask_function))

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        forward = flex_forward if isinstance(attention_mask, BlockMask) else plain_attention
        return forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    if attention_mask is not None and attention_mask.is_floating_point():
        # An additive mask must have the dtype of the query, which may differ from the model's.
        attention_mask = attention_mask.to(query.dtype)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Each model file defines its own eager attention, with its own soft caps and sinks.
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


_register_dense(SDPA, sdpa_mask, _sdpa, lambda dtype: -torch.inf)
_register_dense(EAGER, eager_mask, _eager, lambda dtype: torch.finfo(dtype).min)
_register_flex(FLEX, sdpa_mask, sdpa_attention_forward)
_register_flex(FLEX_UNFUSED, eager_mask, _eager)


def enable_trees(model: PreTrainedModel) -> None:
    """Switch a model to the registered attention implementation that suits it.

    FlexAttention if the model was loaded with it; otherwise sdpa, or eager if the model was loaded with eager or
    refuses sdpa. Whether the model can run trees at all is tested by :mod:`stepjepa.models.probe`.
    """
    sdpa = getattr(model, "_supports_sdpa", False)
    if uses_flex(model):
        # Releases of transformers that run Gemma-2 with sdpa omit its soft cap there; FlexAttention applies it.
        caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        model.set_attn_implementation(FLEX if sdpa and not caps else FLEX_UNFUSED)
        return
    eager = not sdpa or "eager" in (model.config._attn_implementation or "")
    model.set_attn_implementation(EAGER if eager else SDPA)
