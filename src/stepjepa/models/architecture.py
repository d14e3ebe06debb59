"""Parts of a model under its wrappers (PEFT, DDP, FSDP), found by what they are, not by its name."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def base_model(model: Any) -> Any:
    """The transformers model under a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def causal_model(model: nn.Module) -> Any:
    """The causal language model under DDP and the like; a PEFT wrapper stays."""
    while not hasattr(model, "get_output_embeddings") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]  # checked on the line above
    return model


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The part of a causal language model below its head, under any wrapper.

    Raises:
        ValueError: it has none.
    """
    causal = causal_model(model)
    decoder = causal.get_decoder()
    if decoder is causal or not isinstance(decoder, PreTrainedModel):
        # Some models have no get_decoder of their own, and the inherited one misses theirs.
        decoder = getattr(causal, "model", None)
    if not isinstance(decoder, PreTrainedModel):
        raise ValueError(f"expected a causal language model with a decoder, got {type(causal).__name__} without one")
    return decoder


def has_experts(model: nn.Module) -> bool:
    """Whether a model sends tokens to some of several experts, so that a step may leave weights unused."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
