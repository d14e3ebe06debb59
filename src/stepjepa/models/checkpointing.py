"""Selective gradient checkpointing: the backward pass recomputes cheap operations, but no matrix products.

Full checkpointing (``--gradient_checkpointing``) keeps only the input of each block and runs the whole block again.
Selective checkpointing also keeps the results of matrix products and of attention, and recomputes only the operations
between them: norms, activations, rotary angles, casts. It adds a negligible number of FLOPs, and saves less memory.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import TrainingArguments

from stepjepa.models.architecture import base_model

# Listed by name, since not every build of torch has all of them.
KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "bitsandbytes::gemm_4bit",
        "bitsandbytes::int8_linear_matmul",
        "bitsandbytes::int8_scaled_mm",
        "bitsandbytes::int8_mixed_scaled_mm",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
"""Operations whose results are kept: matrix products, and attention computed by one kernel."""


def enable_selective(model: nn.Module) -> None:
    """Make a model, not yet wrapped by DDP or FSDP, keep the results of products and attention in its blocks.

    Raises:
        ValueError: the architecture has no gradient checkpointing.
    """
    base = base_model(model)
    # The name in newer releases of transformers.
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": _contexts})


def refuse_full(args: TrainingArguments) -> None:
    """Refuse selective checkpointing together with another kind of checkpointing.

    Raises:
        ValueError: another kind is switched on as well.
    """
    # FSDP has its own activation checkpointing.
    sharding: dict[str, Any] = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    if args.gradient_checkpointing:
        raise ValueError(
            "selective_checkpointing and gradient_checkpointing exclude each other; leave one out (the second keeps "
            "less and computes more)"
        )
    if str(sharding.get("activation_checkpointing", False)).lower() == "true":
        raise ValueError("selective_checkpointing and activation_checkpointing of fsdp_config exclude each other")


def _contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    # A higher-order operation (FlexAttention) has no schema; it is recomputed.
    schema = getattr(operation, "_schema", None)
    kept = schema is not None and schema.name in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
