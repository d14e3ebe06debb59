"""New tokens of a model: their rows in its embedding and head, spare ones first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from stepjepa.chat.plain_template import add_plain_tokens
from stepjepa.chat.predictors import add_predictor_tokens, all_predictor_ids
from stepjepa.models.pretraining import add_ends

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def give_plain_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int = 42) -> list[int]:
    """Add the tokens of the form without a chat to a tokenizer and rows for them to a model, which stops at its end.

    Rows are found as for predictor tokens, see :func:`give_predictors`.

    Args:
        model: changed in place.
        tokenizer: changed in place.
        seed: of the new rows.

    Returns:
        The ids of ``<|perception|>`` and ``<|eot_id|>``.
    """
    known = len(tokenizer)
    ids = add_plain_tokens(tokenizer)
    _fill_rows(model, len(tokenizer), [index for index in ids if index >= known], seed)
    add_ends(model, ids[1:])
    return ids


def adapter_ids(tokenizer: PreTrainedTokenizerBase, *, plain: bool) -> list[int]:
    """Tokens whose rows an adapter must train and carry with it: its base, loaded again, has none of them.

    Args:
        tokenizer: with all tokens of the run.
        plain: the run has no chat format; then the tokens of that form are among them.
    """
    return sorted({*all_predictor_ids(tokenizer), *(add_plain_tokens(tokenizer) if plain else ())})


def give_predictors(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 42) -> None:
    """Add ``<|predictor_1|>`` .. ``<|predictor_count|>`` to a tokenizer and rows for them to a model.

    Rows that the embedding has beyond the tokenizer are used first; only then is it made larger. New rows, and spare
    ones that can't be told apart (all zeros, or all alike), are drawn around the mean of the others, so that the K
    tokens do not act as one. In a head of its own they stay at that mean: no predictor token is ever a label.

    Args:
        model: changed in place.
        tokenizer: changed in place.
        count: K.
        seed: of the new rows.
    """
    if count == 0:
        return
    known = set(tokenizer.get_added_vocab().values())
    ids = add_predictor_tokens(tokenizer, count)
    _fill_rows(model, len(tokenizer), [index for index in ids if index not in known], seed)


def _fill_rows(model: PreTrainedModel, rows: int, new: Sequence[int], seed: int) -> None:
    """Rows for new tokens: spare ones first."""
    resized = grow(model, rows)
    if new:
        _make_distinct(model.get_input_embeddings().weight, new, seed, anew=resized)


def grow(model: PreTrainedModel, rows: int) -> bool:
    """Make the embedding larger if need be; new rows of a separate head are the mean of the others."""
    known = model.get_input_embeddings().weight.shape[0]
    if known >= rows:
        return False
    model.resize_token_embeddings(rows, mean_resizing=False)
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        with torch.no_grad():
            head.weight[known:] = head.weight[:known].float().mean(0).to(head.weight.dtype)
    return True


def _make_distinct(weight: torch.Tensor, rows: Sequence[int], seed: int, *, anew: bool) -> None:
    """Draw rows from the distribution of those before them: ``anew``, or where they are zero or alike."""
    with torch.no_grad():
        old = weight[: min(rows)].float()
        mean, spread = old.mean(0), old.std(0)
        fresh = weight[list(rows)].float()
        scale = spread.norm()
        distances = torch.cdist(fresh, fresh) + torch.eye(len(rows), device=fresh.device) * scale
        told_apart = bool(distances.min() > 0.5 * scale and (fresh.norm(dim=-1) > 0.5 * scale).all())
        if told_apart and not anew:
            return
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(fresh.shape, generator=generator).to(fresh.device)
        weight[list(rows)] = (mean + spread * noise).to(weight.dtype)
