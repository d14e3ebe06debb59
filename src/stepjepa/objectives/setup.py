"""Prepare a model and its tokenizer for an objective: tokens and their rows, chat template, generation, attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.chat.special_tokens import predictor_ids
from stepjepa.chat.template import ChatTemplate
from stepjepa.config.jepa import JepaConfig, check_objective_effects
from stepjepa.models.adapters import check_adapter
from stepjepa.models.architecture import base_model, check_unwrapped, find_decoder, find_heads, number_of_layers
from stepjepa.models.attention import enable_trees, uses_flex
from stepjepa.models.encode import check_layer
from stepjepa.models.generation_settings import serve_as_trained
from stepjepa.models.lm_head import LMHead
from stepjepa.models.probe import EncodingChoice, choose_encoding, freeze_unreached, probe
from stepjepa.models.token_rows import add_plain_rows, add_predictor_rows, added_rows, train_rows
from stepjepa.models.trained_rows import replace_token_layers
from stepjepa.objectives.pair_cache import check_compared_pairs
from stepjepa.objectives.term import Term
from stepjepa.views.layouts import LAYOUTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def set_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, seed: int = 42
) -> EncodingChoice:
    """Prepare a causal language model, or a PEFT wrapper of one, and its tokenizer for an objective, in place.

    Adds missing tokens, with rows drawn by the seed; writes the variables that training fixes into the chat template;
    sets the stop tokens of generation, and the tokens that it must never produce; switches attention to trees if the
    model can run them. ``architecture.attach_heads`` attaches the heads of terms. :class:`Jepa` does all of this, and
    makes batches and losses, too.

    Args:
        model: on any device; neither wrapped by DDP or FSDP nor compiled yet.
        tokenizer: fast, with a chat template unless ``config.plain``.
        config: mode, layout, predictor tokens and encoding.
        seed: of new embedding rows.

    Returns:
        The encoding of micro-batches, and the reason for it in words.

    Raises:
        ValueError: the model can't be trained with this objective; the message names the remedy.
    """
    _check_model(model)
    if not config.plain:
        ChatTemplate(tokenizer, config.chat_template_kwargs).check_variables()
    base = base_model(model)
    if hasattr(model, "peft_config"):
        check_adapter(model)
    new = add_plain_rows(base, tokenizer, seed) if config.plain else []
    add_predictor_rows(base, tokenizer, config.used_predictors, seed)
    if hasattr(model, "peft_config"):
        # An adapter must also train the rows of other tokens that its base lacked.
        new = [*predictor_ids(tokenizer, config.used_predictors), *new, *added_rows(base)]
        train_rows(model, tokenizer, sorted({*new}))
        replace_token_layers(model)
    serve_as_trained(base, tokenizer, plain=config.plain, variables=config.chat_template_kwargs)
    chosen = set_up_attention(model, config)
    LMHead(model)  # runs the model on a few tokens, which must happen before it is wrapped
    return chosen


def _check_model(model: PreTrainedModel) -> None:
    """Raise a ``ValueError`` for a compiled model, and for one without an LM head."""
    if any(name == "_orig_mod" for name, _ in model.named_children()):
        raise ValueError(
            "expected a model that is not compiled yet: its weights would be saved under names that nothing loads; "
            "pass model._orig_mod, and in a loop of your own compile it afterwards"
        )
    if not hasattr(base_model(model), "generation_config"):
        kind = type(base_model(model)).__name__
        raise ValueError(f"expected a causal language model, got a {kind}; load it with AutoModelForCausalLM")


def check_parts(model: object, tokenizer: object, config: object) -> None:
    """Raise a ``TypeError`` for an argument of ``Jepa`` of another kind, such as a name or one in another's place.

    ``ValueError`` for a model inside a wrapper.
    """
    for name, value, fits, expected in (
        ("model", model, isinstance(model, nn.Module), "a model, as load_model(NAME) returns one"),
        ("tokenizer", tokenizer, hasattr(tokenizer, "apply_chat_template"), "the tokenizer of the model"),
        ("config", config, config is None or isinstance(config, JepaConfig), "JepaConfig(...)"),
    ):
        if not fits:
            raise TypeError(f"{name}: got {type(value).__name__}, expected {expected}")
    if isinstance(model, nn.Module):
        check_unwrapped(model)


def check_own(model: nn.Module, batch: object, prepared: nn.Module) -> None:
    """Raise an error for a model that :func:`set_up` has not prepared, and for what is no batch of trees.

    Args:
        model: that is to be run, under any wrapper.
        batch: that it is to be run on.
        prepared: the model that was prepared.

    Raises:
        TypeError: the batch is not from a collator of this package.
        ValueError: the model has another attention than the prepared one, so that tokens of a tree would see too much.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"batch: expected one of jepa.collate(records), got {type(batch).__name__}")
    if len({find_decoder(each).config._attn_implementation for each in (model, prepared)}) > 1:
        raise ValueError(
            "the model is not the one that this Jepa has set up, and its attention sees no trees; make a "
            "Jepa(model, tokenizer, config) of it"
        )


def check_loop(config: JepaConfig, terms: Mapping[str, Term], *, own_terms: bool) -> None:
    """Raise an error for settings that a training loop of the user's own can't have, or that do nothing there.

    Args:
        config: of the objective.
        terms: the terms, by name.
        own_terms: whether they are the user's, instead of those that the configuration describes.
    """
    check_objective_effects(config, own_terms=own_terms)
    check_compared_pairs(config, terms)
    for name, all_steps in (("jepa_ratio", 1.0), ("jepa_epochs", None)):
        if config.uses_views and getattr(config, name) != all_steps:
            instead = "'collate(records, views=False)' in the steps without views"
            raise ValueError(f"{name}: use {all_steps}, and {instead}; or train with JepaTrainer")
    if config.target_grad == "ema":
        raise ValueError("target_grad 'ema' needs JepaTrainer; use 'stop' or 'on'")


def check_heads(model: nn.Module, needed: Collection[str]) -> None:
    """Raise a ``ValueError`` if a model lacks heads of terms, which are ``needed`` by name."""
    if missing := {*needed} - {*(find_heads(model) or ())}:
        names = ", ".join(sorted(missing))
        raise ValueError(f"expected a model with {names}, got one without; Jepa(..., heads=True) attaches new ones")


def set_up_attention(model: PreTrainedModel, config: JepaConfig) -> EncodingChoice:
    """Do the part of :func:`set_up` that reads no weights and so also works on the meta device.

    Args:
        model: must have rows for all tokens of the objective; changed in place.
        config: layout, encoding and layer.

    Returns:
        The encoding of micro-batches, and the reason for it in words.

    Raises:
        ValueError: the layout needs an encoding that the model can't run, or the model lacks the layer.
    """
    base = base_model(model)
    choice = choose_encoding(base, config.encoding)
    freeze_unreached(model)
    assert config.layout is not None
    if LAYOUTS[config.layout].changes_text and config.uses_views and choice.encoding != "tree":
        raise ValueError(f"layout '{config.layout}' needs encoding 'tree', but {choice.reason}; use 'branched'")
    # Plain rows are faster under sdpa than under FlexAttention; ``tree_flex`` runs them under sdpa.
    if choice.encoding == "tree" or uses_flex(base):
        enable_trees(base, segments=choice.encoding == "tree" and probe(base).segments)
    check_layer(number_of_layers(model), config.jepa_layer)
    return choice
