"""Parts of a model that are found by what they are, not by its name."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The part of a causal language model below its head, under any wrapper (PEFT, DDP, FSDP).

    Raises:
        ValueError: it has none.
    """
    while not hasattr(model, "get_decoder") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]  # checked on the line above
    decoder = model.get_decoder()  # type: ignore[operator]  # a method of every PreTrainedModel
    if decoder is model or not isinstance(decoder, PreTrainedModel):
        # Some models have no get_decoder of their own, and the inherited one misses theirs.
        decoder = getattr(model, "model", None)
    if not isinstance(decoder, PreTrainedModel):
        raise ValueError(f"expected a causal language model with a decoder, got {type(model).__name__} without one")
    return decoder


def has_experts(model: nn.Module) -> bool:
    """Whether a model sends tokens to some of several experts, so that a step may leave weights unused."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
