"""FlexAttention over prefix trees: the trees' rule as a block mask that skips blocks in which no key is seen.

The kernel is compiled for one shape at a time, so the inputs of attention are padded to one of a few row lengths. All
other layers run without this padding.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import PreTrainedModel

from stepjepa.batch.mask import BLOCK, Rule, Trees, blocks, padded, sees, static_length, under

SHAPES = 256
"""Most shapes that the kernel is compiled for; beyond this limit (torch's default is 8) it silently runs uncompiled."""

NO_TRAINING_ON_CPU = (
    "FlexAttention has no backward pass on a CPU; train with attention implementation 'sdpa' there "
    "(--attn_implementation sdpa), or on a GPU"
)


def uses_flex(model: PreTrainedModel) -> bool:
    """Whether a model's attention is FlexAttention, transformers' own or the trees'."""
    return "flex" in (model.config._attn_implementation or "")


def refuse_flex_training(model: PreTrainedModel, device: torch.device) -> None:
    """Refuse, before the first step, training that FlexAttention does not support.

    Raises:
        ValueError: the model's attention is FlexAttention, and the device is a CPU or the attention has dropout.
    """
    if not uses_flex(model):
        return
    if device.type == "cpu":
        raise ValueError(NO_TRAINING_ON_CPU)
    config = model.config.get_text_config()
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(config, name, 0.0):
            raise ValueError(f"FlexAttention has no dropout; set {name} to 0 in the model's configuration, or use sdpa")


def block_mask(trees: Trees, rule: Rule | None = None) -> BlockMask:
    """The FlexAttention mask of a batch, over rows of ``static_length(T)`` tokens.

    Args:
        trees: of the batch, on the model's device.
        rule: of the model, over positions; None for the ordinary causal one. The blocks are found without evaluating
            it, so a window or an isolated token skips none.
    """
    length = static_length(trees.start.shape[1])
    narrow = padded(trees, length)
    # The kernel reads 32-bit integers faster.
    small = Trees(narrow.start.int(), narrow.end.int(), narrow.position_ids.int(), trees.isolates)
    allowed = sees(small) if rule is None else under(rule, small)
    found = blocks(small, exact=rule is None and not trees.isolates)
    return BlockMask.from_kv_blocks(
        *_listed(found.partial),
        *_listed(found.full),
        BLOCK_SIZE=BLOCK,
        mask_mod=allowed,
        seq_lengths=(length, length),
    )


def _listed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries: the number of key blocks that it sees, and all key blocks, those first."""
    dense = dense[:, None]  # [B, 1, N, N], for all heads
    order = dense.int().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.int().contiguous()


@functools.cache
def _compiled() -> Any:
    # With dynamic shapes the kernel would be recompiled, or run many times slower.
    return torch.compile(flex_attention, dynamic=False)


def _on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _run(query: Tensor, *args: Any, **kwargs: Any) -> Any:
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
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers calls, under the mask of :func:`block_mask`.

    Args:
        module: the attention layer.
        query: ``[B, H, T, d]``.
        key: ``[B, G, T, d]``, H a multiple of G.
        value: ``[B, G, T, d]``.
        attention_mask: the block mask.
        scaling: factor of the scores; None for ``d ** -0.5``.
        dropout: must be 0, else ValueError.
        softcap: bound of the scores, applied by tanh; None for no bound.
        s_aux: ``[H]`` attention sinks: additional scores that take a share of the softmax and have no value.

    Returns:
        ``[B, T, H, d]``, and None in place of the attention weights.
    """
    if dropout:
        raise ValueError(f"FlexAttention has no dropout, got {dropout}; set it to 0 in the model's configuration")
    grouped = query.shape[1] != key.shape[1]
    if isinstance(query, FakeTensor) and not torch.compiler.is_compiling():
        # A dry run, for shapes and memory: use those of a fused kernel without a mask tensor.
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return found.transpose(1, 2).contiguous(), None
    if _on_cpu(query) and torch.is_grad_enabled() and query.requires_grad:
        raise ValueError(NO_TRAINING_ON_CPU)

    length = query.shape[2]
    if more := attention_mask.seq_lengths[0] - length:
        query, key, value = (F.pad(tensor, (0, 0, 0, more)) for tensor in (query, key, value))
    found = _run(
        query,
        key,
        value,
        score_mod=None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=grouped,
        return_aux=None if s_aux is None else AuxRequest(lse=True),
    )
    if s_aux is not None:
        found, extra = found
        found = (found * torch.sigmoid(extra.lse - s_aux[:, None])[..., None]).to(query.dtype)
    return found[:, :, :length].transpose(1, 2).contiguous(), None
