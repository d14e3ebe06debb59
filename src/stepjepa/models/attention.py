"""The mask of prefix trees for any model that uses transformers' attention interface.

Registers ``tree_sdpa``, ``tree_eager`` and ``tree_flex``. They compute what ``sdpa``, ``eager`` and ``flex_attention``
compute, under a mask that combines the model's own rule (causal, sliding window, chunked; distances counted in
``position_ids``) with the rule of the trees. ``tree_segments`` and ``tree_varlen`` do the same as ``tree_sdpa``, except
that a row with segments runs segment by segment, see :mod:`stepjepa.models.segment_attention`. Outside
:func:`tree_mask` all behave as the originals; ``tree_flex`` then runs sdpa (plain rows need no block mask), and
``tree_flex_unfused``, for models that refuse sdpa or have soft caps, runs eager attention.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from stepjepa.batch.mask import (
    BLOCK,
    Kernel,
    Rule,
    Trees,
    VarlenSegments,
    blocks,
    combined_rule,
    dense,
    padded,
    static_length,
    tree_rule,
)
from stepjepa.models.segment_attention import SegmentMask, segment_forward, segment_mask
from stepjepa.models.varlen_attention import VarlenMask, varlen_forward

SDPA, EAGER = "tree_sdpa", "tree_eager"
SEGMENTS, VARLEN = "tree_segments", "tree_varlen"
FLEX, FLEX_UNFUSED = "tree_flex", "tree_flex_unfused"

# Most shapes that FlexAttention is compiled for; beyond torch's default of 8 it would silently run uncompiled.
SHAPES = 256

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


def enable_trees(model: PreTrainedModel, *, segments: bool = False) -> None:
    """Switch a model to the registered attention implementation that suits it.

    FlexAttention if the model was loaded with it; otherwise sdpa, or eager if the model was loaded with eager or
    refuses sdpa. ``segments`` lets a model that takes sdpa run segments, too, see :func:`segment_kernel`, unless it was
    loaded with ``tree_sdpa``, which keeps it under a mask. :mod:`stepjepa.models.probe` tests whether a model can run
    trees, and segments.
    """
    if uses_flex(model):
        sdpa = getattr(model, "_supports_sdpa", False)
        # Releases of transformers that run Gemma-2 with sdpa omit its soft cap there; FlexAttention applies it.
        caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        model.set_attn_implementation(FLEX if sdpa and not caps else FLEX_UNFUSED)
    elif plain_attention(model) == "sdpa":
        loaded_with = model.config._attn_implementation
        by_segments = loaded_with if loaded_with in (SDPA, VARLEN) else SEGMENTS
        model.set_attn_implementation(by_segments if segments else SDPA)
    else:
        model.set_attn_implementation(EAGER)


def plain_attention(model: PreTrainedModel) -> str:
    """Return the attention of plain rows: sdpa, or eager if the model uses eager or refuses sdpa."""
    eager = "eager" in (model.config._attn_implementation or "")
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not eager else "eager"


def segment_kernel(model: PreTrainedModel, device_type: str, *, varlen: bool) -> Kernel:
    """Return the form in which a model, prepared by :func:`enable_trees`, runs trees on a device.

    Args:
        model: prepared.
        device_type: such as ``cuda``.
        varlen: FlashAttention computes the model's attention there. A model loaded with ``tree_varlen`` uses it anyway;
            what FlashAttention can't compute then runs a segment at a time.
    """
    attention = model.config._attn_implementation
    if attention not in (SEGMENTS, VARLEN):
        return "mask"
    if device_type == "cpu":
        return "cheapest"
    return "varlen" if varlen or attention == VARLEN else "mask"


# -- Dense masks -------------------------------------------------------------------------------------------------------


Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""Attention of a layer, with the signature that transformers calls: module, query, key, value, mask, options."""

Mask = Tensor | BlockMask | SegmentMask | VarlenMask | None
"""The mask argument of a layer, in any of the forms of attention here."""


def _register(
    name: str,
    attention: Attention,
    plain_mask: Callable[..., Mask],
    mask_of_trees: Callable[[Trees, Rule | None, torch.dtype], Mask],
) -> None:
    """Register attention whose mask is ``mask_of_trees(trees, rule, dtype)`` inside ``tree_mask``, else plain."""

    def mask(
        *args: object, mask_function: Rule = causal_mask_function, dtype: torch.dtype = torch.float32, **kwargs: object
    ) -> Mask:
        trees = _current.get()
        if trees is None:
            return plain_mask(*args, mask_function=mask_function, dtype=dtype, **kwargs)
        # The trees' rule shows a query no token at a later position, so the causal rule removes nothing.
        return mask_of_trees(trees, None if mask_function is causal_mask_function else mask_function, dtype)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def _additive(trees: Trees, rule: Rule | None, dtype: torch.dtype) -> Tensor:
    """Return a mask ``[R, 1, T, T]``: 0 where a key is seen, else the lowest number of the dtype.

    Not a boolean mask: eager attention would add it to the scores as 0 and 1 (silently wrong), and fused attention
    would convert it to an additive mask in every layer and keep each copy until the backward pass.
    """
    allowed = dense(trees, rule)
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _fused(trees: Trees, rule: Rule | None, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of fused attention, such that no layer on a GPU needs a copy of it."""
    allowed = dense(trees, rule)
    device, (*front, length) = allowed.device, allowed.shape
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    # The memory-efficient kernel reads rows that begin at multiples of 16 numbers.
    longer = torch.zeros(*front, -(-length // 16) * 16, dtype=dtype, device=device)
    return longer[..., :length].masked_fill_(~allowed, -torch.inf)


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, Tensor | None]:
    if attention_mask is not None and attention_mask.is_floating_point():
        # An additive mask must have the dtype of the query, which may differ from the model's.
        attention_mask = attention_mask.to(query.dtype)
    attention: Attention = sdpa_attention_forward
    return attention(module, query, key, value, attention_mask, **kwargs)


def _eager(module: nn.Module, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
    # Each model file defines its own eager attention, with its own soft caps and sinks.
    attention: Attention = sys.modules[type(module).__module__].eager_attention_forward
    return attention(module, *args, **kwargs)


# -- FlexAttention -----------------------------------------------------------------------------------------------------


def uses_flex(model: PreTrainedModel) -> bool:
    """Return whether a model's attention is FlexAttention, transformers' own or the trees'."""
    return "flex" in (model.config._attn_implementation or "")


def block_mask(trees: Trees, rule: Rule | None = None) -> BlockMask:
    """Return the FlexAttention mask of a batch, over rows of ``static_length(T)`` tokens.

    ``rule`` is the model's own, over positions; None for the ordinary causal one. It is not evaluated to choose blocks,
    so neither a sliding window nor isolation lets the kernel skip one.
    """
    length = static_length(trees.start.shape[1])
    longer = padded(trees, length)
    # The kernel reads 32-bit integers faster.
    small = Trees(longer.start.int(), longer.end.int(), longer.position_ids.int(), trees.isolates)
    visible = blocks(small, exact=rule is None and not trees.isolates)
    return BlockMask.from_kv_blocks(
        *_listed(visible.partial),
        *_listed(visible.full),
        BLOCK_SIZE=BLOCK,
        mask_mod=tree_rule(small) if rule is None else combined_rule(rule, small),
        seq_lengths=(length, length),
    )


def _listed(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each block of queries, the number of key blocks that it sees, and all key blocks, those first."""
    visible = visible[:, None]  # [B, 1, N, N], for all heads
    order = visible.int().argsort(dim=-1, descending=True, stable=True)
    return visible.sum(-1, dtype=torch.int32), order.int().contiguous()


@cache
def _compiled() -> Callable[..., Tensor]:
    # With dynamic shapes the kernel would be recompiled, or run many times slower.
    return torch.compile(flex_attention, dynamic=False)


def _on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _run_flex(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return flex_attention(query, *args, **kwargs)
    if _on_cpu(query):
        # Evaluation of a few rows of many lengths: compiling takes longer than running them.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return flex_attention(query, *args, **kwargs)
    with torch._dynamo.config.patch(recompile_limit=SHAPES):
        return _compiled()(query, *args, **kwargs)


def flex_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention under the mask of :func:`block_mask`, with the signature that transformers calls.

    Rows are padded to one of a few lengths, since the kernel is compiled for one shape at a time.

    Args:
        module: the layer, which transformers passes.
        query: ``[B, H, T, d]``.
        key: ``[B, G, T, d]``, H a multiple of G.
        value: ``[B, G, T, d]``.
        attention_mask: of :func:`block_mask`.
        scaling: factor of the scores; None for ``1 / sqrt(d)``.
        dropout: must be 0.
        softcap: limit of the scores, by tanh; None for none.
        s_aux: ``[H]`` attention sinks: further scores that take a share of the softmax and have no value.

    Returns:
        ``[B, T, H, d]``, and None in place of attention weights.

    Raises:
        ValueError: the layer has dropout.
    """
    if dropout:
        raise ValueError(f"FlexAttention has no dropout, got {dropout}; set it to 0 in the model's configuration")
    length = query.shape[2]
    if more := attention_mask.seq_lengths[0] - length:
        query, key, value = (F.pad(tensor, (0, 0, 0, more)) for tensor in (query, key, value))
    output = _run_flex(
        query,
        key,
        value,
        score_mod=None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if s_aux is None else AuxRequest(lse=True),
    )
    if s_aux is not None:
        output, extra = output
        output = (output * torch.sigmoid(extra.lse - s_aux[:, None])[..., None]).to(query.dtype)
    return output[:, :, :length].transpose(1, 2).contiguous(), None


def _flex_or(
    plain: Attention, module: nn.Module, *states_and_mask: object, **kwargs: object
) -> tuple[Tensor, Tensor | None]:
    """Run FlexAttention under the block masks of trees, else plain attention."""
    forward: Attention = flex_forward if isinstance(states_and_mask[-1], BlockMask) else plain
    return forward(module, *states_and_mask, **kwargs)


def _additive_or_segments(trees: Trees, rule: Rule | None, dtype: torch.dtype) -> Tensor | SegmentMask | VarlenMask:
    """Return the mask of a row that runs by segments, or of rows under an additive mask."""
    if isinstance(trees.segments, VarlenSegments):
        return VarlenMask(trees.position_ids[0], trees.segments, rule)
    if trees.segments is not None:
        return segment_mask(trees, trees.segments, rule, dtype)
    return _fused(trees, rule, dtype)


def _sdpa_or_segments(module: nn.Module, *states_and_mask: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
    """Run attention by segments under their masks, else sdpa."""
    mask = states_and_mask[-1]
    forward: Attention = _sdpa
    if isinstance(mask, SegmentMask | VarlenMask):
        _refuse_scores(kwargs)
        forward = segment_forward if isinstance(mask, SegmentMask) else varlen_forward
    return forward(module, *states_and_mask, **kwargs)


def _refuse_scores(options: Mapping[str, object]) -> None:
    """Raise ``ValueError`` if a layer changes its scores (caps, sinks, biases), which fused attention can't."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"attention by segments has no {name}; load the model with attn_implementation 'eager'")


_register(SDPA, _sdpa, sdpa_mask, _fused)
for _name in (SEGMENTS, VARLEN):
    _register(_name, _sdpa_or_segments, sdpa_mask, _additive_or_segments)
_register(EAGER, _eager, eager_mask, _additive)
_register(FLEX, partial(_flex_or, sdpa_attention_forward), sdpa_mask, lambda trees, rule, _: block_mask(trees, rule))
_register(FLEX_UNFUSED, partial(_flex_or, _eager), eager_mask, lambda trees, rule, _: block_mask(trees, rule))
