"""Rows of new tokens in the embedding and the LM head: use spare rows, add rows, train rows; rows without a token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from stepjepa.chat.special_tokens import add_plain_tokens, add_predictor_tokens, all_predictor_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Model -> tokens whose rows it lacked when it was loaded.
_added: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()


def rows_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of embedding rows that a tokenizer needs; gaps between its ids need rows, too."""
    last: int = max(tokenizer.get_vocab().values())
    return max(len(tokenizer), last + 1)


def add_missing_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int = 42) -> int:
    """Add the rows that a model lacks for its tokenizer, as :func:`add_predictor_rows`; return their number.

    Args:
        model: changed in place.
        tokenizer: has all tokens.
        seed: of the new rows.
    """
    missing = rows_of(tokenizer) - len(model.get_input_embeddings().weight)
    _fill_rows(model, tokenizer, [], seed)
    return max(missing, 0)


def add_plain_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int = 42) -> list[int]:
    """Add the plain format's tokens to a tokenizer and rows for them to a model, and stop generation at ``<|eot_id|>``.

    Rows are as in :func:`add_predictor_rows`. Returns the ids of ``<|perception|>`` and ``<|eot_id|>``.

    Args:
        model: changed in place.
        tokenizer: changed in place.
        seed: of the new rows.
    """
    before, ids = tokenizer.get_added_vocab().values(), add_plain_tokens(tokenizer)
    _fill_rows(model, tokenizer, [index for index in ids if index not in before], seed)
    add_stop_tokens(model, ids[1:])
    return ids


def add_predictor_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 42) -> None:
    """Add ``<|predictor_1|>`` .. ``<|predictor_count|>`` to a tokenizer and rows for them to a model.

    The embedding is enlarged only if its spare rows, those beyond the tokenizer, do not suffice. New rows are drawn
    around the mean of the others, so that the K tokens get different embeddings. So are spare rows that are alike (all
    zeros, for example), and rows of tokens that the tokenizer has and the model lacks. New rows of a separate head are
    set to the mean: no predictor token is ever a label.

    Args:
        model: changed in place.
        tokenizer: changed in place.
        count: number of predictor tokens.
        seed: of the new rows.
    """
    before = set(tokenizer.get_added_vocab().values())
    ids = add_predictor_tokens(tokenizer, count) if count else []
    _fill_rows(model, tokenizer, [index for index in ids if index not in before], seed)


def _is_wrapped(part: object) -> bool:
    """Return whether a layer is wrapped by an adapter (``modules_to_save``, LoRA on the embedding, trained rows)."""
    return type(part).__module__.startswith("peft.")


def resize_embedding(model: PreTrainedModel, rows: int) -> bool:
    """Enlarge the embedding to ``rows`` if it has fewer; new rows of a separate head are the mean of the others.

    Returns:
        Whether it was enlarged.

    Raises:
        ValueError: an adapter wraps the embedding or the head, which then can't be enlarged.
    """
    old_rows = model.get_input_embeddings().weight.shape[0]
    if old_rows >= rows:
        return False
    if any(map(_is_wrapped, (model.get_input_embeddings(), model.get_output_embeddings()))):
        raise ValueError(
            f"the adapter holds the embedding or the LM head, which can't be enlarged in it for {rows - old_rows} new "
            "token(s); load the model with load_model(..., predictors=K), which adds them, before get_peft_model"
        )
    _added.setdefault(model, set()).update(range(old_rows, rows))
    model.resize_token_embeddings(rows, mean_resizing=False)
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        with torch.no_grad():
            head.weight[old_rows:] = head.weight[:old_rows].float().mean(0).to(head.weight.dtype)
    return True


@torch.no_grad()
def _fill_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new: Collection[int], seed: int) -> None:
    """Initialise the rows of new tokens: keep distinct spare rows, else sample around the mean of the other rows."""
    rows = rows_of(tokenizer)
    new = sorted({*new, *range(len(model.get_input_embeddings().weight), rows)})
    resized = resize_embedding(model, rows)
    if not new:
        return
    weight = model.get_input_embeddings().weight
    old, fresh = weight[: min(new)].float(), weight[new].float()
    mean, spread = old.mean(0), old.std(0)
    scale = spread.norm()
    distances = torch.cdist(fresh, fresh) + torch.eye(len(new), device=fresh.device) * scale
    are_distinct = bool(distances.min() > 0.5 * scale and (fresh.norm(dim=-1) > 0.5 * scale).all())
    if resized or not are_distinct:
        noise = torch.randn(fresh.shape, generator=torch.Generator().manual_seed(seed)).to(fresh.device)
        weight[new] = (mean + spread * noise).to(weight.dtype)


def add_stop_tokens(model: PreTrainedModel, ends: Sequence[int]) -> None:
    """Add tokens to those at which a model's generation stops, in its generation configuration, in place."""
    configured = model.generation_config.eos_token_id
    every = [*configured] if isinstance(configured, list) else [] if configured is None else [configured]
    every += [end for end in dict.fromkeys(ends) if end not in every]
    model.generation_config.eos_token_id = every[0] if len(every) == 1 else every


def added_rows(model: PreTrainedModel) -> list[int]:
    """Return the tokens whose rows a model lacked when it was loaded."""
    return sorted(_added.get(model, ()))


def adapter_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, plain: bool) -> list[int]:
    """Return the tokens whose rows an adapter must train and save.

    They are the predictor tokens, those of the plain format, and all that the base model lacked.

    Args:
        model: the base model.
        tokenizer: that of the model; gets the plain format's tokens with ``plain``.
        plain: whether the run is in the plain format.
    """
    plain_ids = add_plain_tokens(tokenizer) if plain else ()
    return sorted({*all_predictor_ids(tokenizer), *plain_ids, *added_rows(model)})


TokenIndices = list[int] | dict[str, list[int]]
"""PEFT's ``trainable_token_indices``: token ids of the embedding, or of several layers by their names."""


def adapter_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, plain: bool) -> TokenIndices:
    """Return the rows that an adapter must train and save for :func:`adapter_ids`, see :func:`rows_by_layer`.

    Args:
        model: the base model.
        tokenizer: that of the model.
        plain: whether the run is in the plain format.
    """
    return rows_by_layer(model, tokenizer, adapter_ids(model, tokenizer, plain=plain))


def rows_by_layer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> TokenIndices:
    """Return the rows of some tokens by layer: those of the embedding, and those of an LM head that is not tied to it.

    A tied head shares the embedding's rows. Of an untied one the rows of predictor tokens stay as they are, since none
    is ever a label. So do all rows of a head with a bias, which PEFT leaves out while it trains rows.

    Args:
        model: the base model.
        tokenizer: knows which tokens are predictor tokens.
        ids: the tokens.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    labels = sorted({*ids} - {*all_predictor_ids(tokenizer)})
    untied = type(head) is nn.Linear and head.weight is not embedding.weight and head.bias is None
    if not untied or not labels:
        return list(ids)
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    return {names[embedding]: list(ids), names[head]: labels}


def save_trained_rows_only(model: PreTrainedModel) -> None:
    """Patch a PEFT model to save only its trained rows, and only the adapter that has them.

    PEFT saves the whole embedding when it was resized, and fails to save an adapter beside one with trained rows.
    """
    which = {"selected_adapters": [model.active_adapter]}
    model.save_pretrained = partial(model.save_pretrained, save_embedding_layers=False, **which)


def train_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Make the active adapter of a PEFT model train and save the rows of some tokens that the model has.

    The rows are those of :func:`rows_by_layer`.

    Args:
        model: a PEFT wrapper.
        tokenizer: that of the model.
        ids: the tokens.

    Raises:
        ValueError: this type of adapter can't train rows, or trains other rows already.
    """
    from peft.utils.other import set_additional_trainable_modules

    config = model.active_peft_config
    embedding = model.get_input_embeddings()
    if any(parameter.requires_grad for name, parameter in embedding.named_parameters() if "token_adapter" not in name):
        return  # the whole embedding is trained
    setting = getattr(config, "trainable_token_indices", None)
    trained = {index for part in (setting.values() if isinstance(setting, dict) else [setting or ()]) for index in part}
    if trained.issuperset(ids):
        return
    if trained:
        missing = ", ".join(map(str, sorted({*ids} - trained)))
        raise ValueError(f"trainable_token_indices of the adapter lacks the new tokens {missing}; list them there, too")
    if not hasattr(config, "trainable_token_indices"):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(
            f"this adapter of type {kind} can't train the rows of new tokens; wrap with peft.LoraConfig instead"
        )
    base = model.get_base_model()
    if base.config.tie_word_embeddings and _is_wrapped(base.get_output_embeddings()):
        name = next(name for name, part in base.named_modules() if part is embedding).rpartition(".")[2]
        raise ValueError(
            f"the adapter holds an LM head that is tied to the embedding, of which it must train the rows of new "
            f"tokens, too; list both '{name}' and the LM head in modules_to_save"
        )
    config.trainable_token_indices = rows_by_layer(base, tokenizer, ids)
    save_trained_rows_only(model)
    set_additional_trainable_modules(base, config, base.config.to_dict(), model.active_adapter)


def never_generated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that stand for no text: predictor tokens, and embedding rows without a token.

    Rows without a token are those beyond the last id of the tokenizer, and gaps between its ids. The tokens that end a
    turn may have higher ids than a gap.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    return [*all_predictor_ids(tokenizer), *sorted({*range(rows)}.difference(tokenizer.get_vocab().values()))]
