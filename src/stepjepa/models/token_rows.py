"""Embedding and head rows of new tokens: use spare rows, train rows with an adapter."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens, all_predictor_ids


def give_plain_tokens(model: Any, tokenizer: Any, seed: int = 42) -> list[int]:
    """Add the plain format's tokens to a tokenizer and rows for them to a model, and stop generation at ``<|eot_id|>``.

    Rows are as in :func:`give_predictors`. Returns the ids of ``<|perception|>`` and ``<|eot_id|>``.
    """
    known, ids = len(tokenizer), add_plain_tokens(tokenizer)
    _fill_rows(model, len(tokenizer), [index for index in ids if index >= known], seed)
    add_ends(model, ids[1:])
    return ids


def give_predictors(model: Any, tokenizer: Any, count: int, seed: int = 42) -> None:
    """Add ``<|predictor_1|>`` .. ``<|predictor_count|>`` to a tokenizer and rows for them to a model.

    The embedding is enlarged only if its rows beyond the tokenizer do not suffice. New rows, and spare ones that can't
    be told apart (all zeros, or all alike), are drawn around the mean of the others, so that the K tokens get different
    embeddings. New rows of a separate head are set to the mean: no predictor token is ever a label.
    """
    if count == 0:
        return
    known = set(tokenizer.get_added_vocab().values())
    ids = add_predictor_tokens(tokenizer, count)
    _fill_rows(model, len(tokenizer), [index for index in ids if index not in known], seed)


def grow(model: Any, rows: int) -> bool:
    """Enlarge the embedding if needed (True if so); new rows of a separate head are the mean of the others."""
    known = model.get_input_embeddings().weight.shape[0]
    if known >= rows:
        return False
    model.resize_token_embeddings(rows, mean_resizing=False)
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        with torch.no_grad():
            head.weight[known:] = head.weight[:known].float().mean(0).to(head.weight.dtype)
    return True


@torch.no_grad()
def _fill_rows(model: Any, rows: int, new: Sequence[int], seed: int) -> None:
    """Rows for new tokens: spare rows that differ are kept; else rows are drawn from the distribution of the others."""
    resized = grow(model, rows)
    if not new:
        return
    weight = model.get_input_embeddings().weight
    old, fresh = weight[: min(new)].float(), weight[list(new)].float()
    mean, spread = old.mean(0), old.std(0)
    scale = spread.norm()
    distances = torch.cdist(fresh, fresh) + torch.eye(len(new), device=fresh.device) * scale
    told_apart = bool(distances.min() > 0.5 * scale and (fresh.norm(dim=-1) > 0.5 * scale).all())
    if resized or not told_apart:
        noise = torch.randn(fresh.shape, generator=torch.Generator().manual_seed(seed)).to(fresh.device)
        weight[list(new)] = (mean + spread * noise).to(weight.dtype)


def add_ends(model: Any, ends: Sequence[int]) -> None:
    """Add tokens at which a model's generation stops to its generation configuration, in place."""
    known = model.generation_config.eos_token_id
    every = [*known] if isinstance(known, list) else [] if known is None else [known]
    every += [end for end in dict.fromkeys(ends) if end not in every]
    model.generation_config.eos_token_id = every[0] if len(every) == 1 else every


def adapter_ids(tokenizer: Any, *, plain: bool) -> list[int]:
    """Tokens whose rows an adapter must train and save, since its base lacks them: predictors, the plain format's."""
    return sorted({*all_predictor_ids(tokenizer), *(add_plain_tokens(tokenizer) if plain else ())})


def keep_rows_alone(model: Any) -> None:
    """Make a PEFT model save its trained rows only; PEFT saves the whole embedding when it was resized."""
    model.save_pretrained = partial(model.save_pretrained, save_embedding_layers=False)


def train_rows(model: Any, ids: Sequence[int]) -> None:
    """Make the active adapter of a PEFT model train and save the embedding rows of some tokens that the model has.

    ValueError if this type of adapter can't train rows, or trains other rows already.
    """
    from peft.utils.other import set_additional_trainable_modules

    config = model.active_peft_config
    embedding = model.get_input_embeddings()
    if any(parameter.requires_grad for name, parameter in embedding.named_parameters() if "token_adapter" not in name):
        return  # the whole embedding is trained
    named = getattr(config, "trainable_token_indices", None)
    known = {index for part in (named.values() if isinstance(named, dict) else [named or ()]) for index in part}
    if known.issuperset(ids):
        return
    if known or not hasattr(config, "trainable_token_indices"):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(f"this adapter of type {kind} can't train the rows of new tokens; wrap with add_lora instead")
    base = model.get_base_model()
    config.trainable_token_indices = list(ids)
    keep_rows_alone(model)
    set_additional_trainable_modules(base, config, base.config.to_dict(), model.active_adapter)
