"""Adapters whose embedding rows of new tokens are trained and saved with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from peft.utils.other import set_additional_trainable_modules


def carry_rows(model: Any) -> None:
    """Save an adapter without a copy of the whole embedding, which PEFT adds when it finds the vocabulary resized.

    The trained rows are in the adapter, and the others are the base's.

    Args:
        model: a PEFT wrapper; changed in place.
    """
    model.save_pretrained = partial(model.save_pretrained, save_embedding_layers=False)


def train_rows(model: Any, ids: Sequence[int]) -> None:
    """Let the active adapter of a PEFT model train and save the embedding rows of some tokens.

    Only the rows where the type of adapter knows trained rows (LoRA, DoRA, AdaLoRA), else the whole embedding.

    Args:
        model: a PEFT wrapper of a model that has these rows; changed in place.
        ids: of the tokens.

    Raises:
        ValueError: this type of adapter can train neither, or trains other rows already.
    """
    config = model.active_peft_config
    embedding = model.get_input_embeddings()
    if any(parameter.requires_grad for name, parameter in embedding.named_parameters() if "token_adapter" not in name):
        return  # The whole embedding is trained.
    named = getattr(config, "trainable_token_indices", None)
    known = {index for part in (named.values() if isinstance(named, dict) else [named or ()]) for index in part}
    if known.issuperset(ids):
        return
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    wants = "call add_lora(load_model(..., predictors=K)[0], settings, all_predictor_ids(tokenizer)) instead"
    if known:
        raise ValueError(f"expected an adapter that trains the rows {sorted(ids)}, got one that trains others; {wants}")
    if config.is_prompt_learning or not hasattr(config, "modules_to_save"):
        raise ValueError(f"an adapter of type {kind} can't train the rows of new tokens; take LoRA: {wants}")
    base = model.get_base_model()
    if hasattr(config, "trainable_token_indices"):
        config.trainable_token_indices = list(ids)
        carry_rows(model)
    else:
        name = next(name for name, module in base.named_modules() if module is embedding)
        config.modules_to_save = [*(config.modules_to_save or ()), name.rpartition(".")[2]]
    set_additional_trainable_modules(base, config, base.config.to_dict(), model.active_adapter)
