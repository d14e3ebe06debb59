"""Find parts of a model under its wrappers (PEFT, DDP, FSDP) by their types and attributes, not by the model's name."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def base_model(model: Any) -> Any:
    """The transformers model under a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def causal_model(model: nn.Module) -> Any:
    """The causal language model inside wrappers such as DDP; a PEFT wrapper is kept."""
    while not hasattr(model, "get_output_embeddings") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]  # checked on the line above
    return model


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The decoder of a causal language model (everything below its head), under any wrapper.

    Raises:
        ValueError: the model has no decoder.
    """
    causal = causal_model(model)
    decoder = causal.get_decoder()
    if decoder is causal or not isinstance(decoder, PreTrainedModel):
        # Some models do not override get_decoder, and the inherited method does not find their decoder.
        decoder = getattr(causal, "model", None)
    if not isinstance(decoder, PreTrainedModel):
        raise ValueError(f"expected a causal language model with a decoder, got {type(causal).__name__} without one")
    return decoder


def has_experts(model: nn.Module) -> bool:
    """Whether a model has mixture-of-experts layers, so that a step may leave some weights unused."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
