"""Embedding and head rows of new tokens: use spare rows, train rows with an adapter, remove rows for export."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens, all_predictor_ids
from stepjepa.errors import UserError

# Tokenizer files that list added tokens.
TOKEN_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


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


def strip_rows(model: Any, tokenizer: Any, base_rows: int | None = None) -> int:
    """Remove the rows that were added for predictor tokens from embedding and head, in place; returns how many.

    ``base_rows`` is the number of rows of the base model, which are kept; if it is unknown (None), rows are removed
    only if those of the predictor tokens are the last. Generation no longer suppresses the removed tokens. UserError
    if there are no predictor tokens, or if tokens behind them would change their ids.
    """
    ids, known = all_predictor_ids(tokenizer), len(tokenizer)
    if not ids:
        raise UserError("--strip_predictors: the tokenizer has no predictor tokens; leave it out")
    if behind := sorted(set(range(ids[0], known)) - set(ids)):
        token = tokenizer.convert_ids_to_tokens(behind[0])
        raise UserError(f"--strip_predictors would change the ids of later tokens, such as {token!r}; leave it out")
    rows = int(model.get_input_embeddings().weight.shape[0])
    if base_rows is None:
        base_rows = ids[0] if rows == known else rows
    keep = min(max(base_rows, ids[0]), rows)
    if keep < rows:
        model.resize_token_embeddings(keep, mean_resizing=False)
    suppressed = [index for index in model.generation_config.suppress_tokens or () if index < keep]
    model.generation_config.suppress_tokens = suppressed or None
    return rows - keep


def strip_tokenizer(folder: str | Path, tokenizer: Any, load: Callable[[str], Any]) -> None:
    """Remove the predictor tokens from the files of a folder where ``tokenizer`` was saved.

    UserError if they are still there when it is loaded again (``load``), since its format stores them in other files.
    """
    names = set(tokenizer.convert_ids_to_tokens(all_predictor_ids(tokenizer)))

    def stays(value: Any) -> bool:
        text = value.get("content") if isinstance(value, dict) else value
        return not (isinstance(text, str) and text in names)

    def without(value: Any) -> Any:
        """A JSON value without entries that name one of the tokens: by key, as a string, or by ``content``."""
        if isinstance(value, dict):
            return {key: without(each) for key, each in value.items() if key not in names and stays(each)}
        return [without(each) for each in value if stays(each)] if isinstance(value, list) else value

    for path in (Path(folder) / name for name in TOKEN_FILES):
        if path.is_file():
            content = without(json.loads(path.read_text(encoding="utf-8")))
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if names & set(load(str(folder)).get_added_vocab()):
        kind = type(tokenizer).__name__
        raise UserError(f"--strip_predictors: the files of a {kind} can't be changed here; leave it out")
