"""FlexAttention over a forest: its visibility as a mask that skips blocks of tokens nobody sees.

The kernel is compiled for one shape at a time, so attention runs over rows of few lengths. Only what attention reads is
padded to them; all other layers see rows as long as they are.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from stepjepa.forests.blocks import BLOCK, Rule, evaluated_blocks, padded, static_length, visible_blocks
from stepjepa.forests.masks import Visibility

SHAPES = 256
"""For how many shapes the kernel may be compiled; beyond torch's default of 8 it would silently run uncompiled."""

NO_TRAINING_ON_CPU = (
    "FlexAttention has no backward pass on a CPU; train with attention implementation 'sdpa' there "
    "(--attn_implementation sdpa), or on a GPU"
)


def uses_flex(model: PreTrainedModel) -> bool:
    """Whether a model's attention is FlexAttention, transformers' own or the forest's."""
    return "flex" in (model.config._attn_implementation or "")


def refuse_flex_training(model: PreTrainedModel, device: torch.device) -> None:
    """Say before the first step what FlexAttention can't train.

    Args:
        model: not a PEFT wrapper but the transformers model itself; any attention implementation.
        device: where it will be trained.

    Raises:
        ValueError: its attention is FlexAttention, and the device is a CPU or the attention has dropout.
    """
    if not uses_flex(model):
        return
    if device.type == "cpu":
        raise ValueError(NO_TRAINING_ON_CPU)
    config = model.config.get_text_config()
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(config, name, 0.0):
            raise ValueError(f"FlexAttention has no dropout; set {name} to 0 in the model's configuration, or use sdpa")


def visibility_rule(visibility: Visibility, rule: Callable[..., Tensor]) -> Rule:
    """The forest's visibility and the model's own rule, over places in the row.

    Args:
        visibility: of the batch.
        rule: of the model, over positions; what it is called with are ``position_ids``.
    """
    segment, offset, seen, position = (tensor.int() for tensor in visibility)
    # The kernel is compiled for the shapes of what it reads: few of them, padded with segments that nothing sees.
    more = (1 << max(4, (seen.shape[1] - 1).bit_length())) - seen.shape[1]
    seen = F.pad(seen, (0, more, 0, more))

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other, place = segment[batch, query], segment[batch, key], offset[batch, key]
        return ((own == other) & (place <= offset[batch, query])) | (place < seen[batch, own, other])

    if rule is causal_mask_function:
        # Whatever a forest shows is at an earlier position, so this rule takes nothing away.
        return visible

    def visible_under_rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = rule(batch, head, position[batch, query], position[batch, key])
        return visible(batch, head, query, key) & allowed

    return visible_under_rule


def block_mask(visibility: Visibility, rule: Callable[..., Tensor] = causal_mask_function) -> BlockMask:
    """The mask of a batch for FlexAttention, over rows of ``static_length(T)`` tokens.

    Args:
        visibility: of the batch, on the model's device.
        rule: of the model, over positions. Under the causal one no pair of tokens is evaluated to find the blocks.
    """
    rows, length = visibility.segment_ids.shape
    length = static_length(length)
    visibility = padded(visibility, length)
    allowed = visibility_rule(visibility, rule)
    if rule is causal_mask_function:
        blocks = visible_blocks(visibility)
    else:
        blocks = evaluated_blocks(allowed, rows, length, visibility.segment_ids.device)
    return BlockMask.from_kv_blocks(
        *_listed(blocks.partial),
        *_listed(blocks.full),
        BLOCK_SIZE=BLOCK,
        mask_mod=allowed,
        seq_lengths=(length, length),
    )


def _listed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries how many blocks of keys there are, and all of them, those first."""
    dense = dense[:, None]  # [B, 1, N, N], for all heads
    order = dense.int().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.int().contiguous()


@functools.cache
def _compiled() -> Any:
    # For shapes as they come it would be compiled anew or run many times slower.
    return torch.compile(flex_attention, dynamic=False)


def _on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _run(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return flex_attention(query, *args, **kwargs)
    if _on_cpu(query):
        # Evaluation of a few rows of many lengths: compiling takes longer than they do.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return flex_attention(query, *args, **kwargs)
    with torch._dynamo.config.patch(recompile_limit=SHAPES):
        return _compiled()(query, *args, **kwargs)


def _refuse_gradient(query: Tensor) -> None:
    if _on_cpu(query) and torch.is_grad_enabled() and query.requires_grad:
        raise ValueError(NO_TRAINING_ON_CPU)


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
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer.
        query: ``[B, H, T, d]``.
        key: ``[B, G, T, d]``, H a multiple of G.
        value: the same.
        attention_mask: of :func:`block_mask`.
        scaling: of the scores; None is ``d ** -0.5``.
        dropout: 0.
        softcap: bound of the scores.
        s_aux: ``[H]`` attention sinks: scores that take a share of the softmax and give nothing.

    Returns:
        ``[B, T, H, d]``, and None for the weights.

    Raises:
        ValueError: there is dropout, or a gradient is needed on a CPU.
    """
    if dropout:
        raise ValueError(f"FlexAttention has no dropout, got {dropout}; set it to 0 in the model's configuration")
    grouped = query.shape[1] != key.shape[1]
    if isinstance(query, FakeTensor) and not torch.compiler.is_compiling():
        # A dry run, for shapes and memory: those of a fused kernel that is given no mask tensor.
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return found.transpose(1, 2).contiguous(), None
    _refuse_gradient(query)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    length = query.shape[2]
    if more := attention_mask.seq_lengths[0] - length:
        query, key, value = (F.pad(tensor, (0, 0, 0, more)) for tensor in (query, key, value))
    found = _run(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=grouped,
        return_aux=None if s_aux is None else AuxRequest(lse=True),
    )
    if s_aux is not None:
        found, extra = found
        found = (found * torch.sigmoid(extra.lse - s_aux[:, None])[..., None]).to(query.dtype)
    return found[:, :, :length].transpose(1, 2).contiguous(), None
