"""What a model's architecture allows: the forest, plain rows, or neither. Judged by its layers, not by its name."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

# Values of ``config.layer_types`` whose layers mix tokens by attention alone, under a mask.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


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


def why_no_forest(model: PreTrainedModel) -> str | None:
    """The reason why a model's layers can't run a forest, or None if they can."""
    config = model.config.get_text_config()
    name = type(model).__name__
    mixers = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if getattr(model, "_is_stateful", False) or mixers:
        kind = ", ".join(mixers) or "recurrent"
        return f"{name} has {kind} layers, which carry tokens past any attention mask"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not use transformers' attention interface, so a custom mask would not reach its layers"
    if getattr(config, "alibi", False):
        return f"{name} takes distances from the place in the row (ALiBi), not from position ids"
    return None


def why_no_rows(model: PreTrainedModel) -> str | None:
    """The reason why a model can't be trained on plain causal rows either, or None if it can."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return f"{type(model).__name__} is an encoder-decoder"
    bidirectional = any(getattr(module, "is_causal", True) is False for module in find_decoder(model).modules())
    if bidirectional or not model.can_generate():
        return f"{type(model).__name__} is not a causal language model"
    return None


def choose_encoding(model: PreTrainedModel, wanted: str) -> tuple[str, str]:
    """Settle ``encoding='auto'`` for a model.

    Args:
        model: not a PEFT wrapper but the transformers model itself.
        wanted: ``auto``, ``forest`` or ``rows``.

    Returns:
        ``forest`` or ``rows``, and the reason in words.

    Raises:
        ValueError: the model can't do what is wanted; the message names the remedy.
    """
    no_rows = why_no_rows(model)
    if no_rows is not None:
        raise ValueError(f"{no_rows}; neither encoding serves it, choose a causal language model")
    no_forest = why_no_forest(model)
    attention = model.config._attn_implementation or "sdpa"
    known = attention in ("sdpa", "eager", "flex_attention") or attention.startswith("forest_")
    if no_forest is None and not known:
        no_forest = f"attention implementation '{attention}' was asked for, and it takes no forest mask here"
    if wanted == "forest":
        if no_forest is not None:
            raise ValueError(f"{no_forest}; use encoding 'rows'")
        return "forest", "as asked for"
    if wanted == "rows":
        return "rows", "as asked for"
    if no_forest is not None:
        return "rows", no_forest
    return "forest", f"all layers of {type(model).__name__} are attention"
