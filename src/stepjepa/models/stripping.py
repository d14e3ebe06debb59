"""Predictor tokens taken out of a trained model again: inference never uses them, and converters stumble over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepjepa.chat.predictors import all_predictor_ids
from stepjepa.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Files of a tokenizer that name its added tokens.
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def strip_rows(model: PreTrainedModel, tokenizer: Any, base_rows: int | None = None) -> int:
    """Remove the rows of the predictor tokens from the embedding and the head, where they were added for them.

    Rows that the base model had beyond its tokenizer, and that predictor tokens only took, stay: the vocabulary of the
    model is then what the base's is already.

    Args:
        model: changed in place; its generation configuration no longer suppresses what it no longer has.
        tokenizer: with the predictor tokens.
        base_rows: rows of the base model, where they are known; else rows are removed where none are beyond the
            predictor tokens.

    Returns:
        How many rows were removed.

    Raises:
        UserError: there are no predictor tokens, or others stand behind them and would change their ids.
    """
    ids, known = all_predictor_ids(tokenizer), len(tokenizer)
    if not ids:
        raise UserError("--strip_predictors: the tokenizer has no predictor tokens; leave it out")
    behind = sorted(set(range(ids[0], known)) - set(ids))
    if behind:
        raise UserError(
            f"--strip_predictors: {len(behind)} tokens stand behind the predictor tokens (the first is "
            f"{tokenizer.convert_ids_to_tokens(behind[0])!r}) and would change their ids; leave it out"
        )
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
    """Remove the predictor tokens from the tokenizer files of a folder.

    Args:
        folder: where ``tokenizer`` was saved; changed in place.
        tokenizer: with the predictor tokens.
        load: reads a tokenizer of a folder.

    Raises:
        UserError: the tokenizer still has them then, since its format names them elsewhere.
    """
    names = frozenset(tokenizer.convert_ids_to_tokens(all_predictor_ids(tokenizer)))
    for name in _FILES:
        path = Path(folder) / name
        if path.is_file():
            content = _without(json.loads(path.read_text(encoding="utf-8")), names)
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if names & set(load(str(folder)).get_added_vocab()):
        raise UserError(
            f"--strip_predictors: a {type(tokenizer).__name__} names its tokens in files that can't be changed here; "
            "leave it out"
        )


def _without(value: Any, names: frozenset[str]) -> Any:
    """A JSON value without what stands for one of the tokens: by its key, as a text, or by its ``content``."""
    if isinstance(value, dict):
        return {
            key: _without(inner, names) for key, inner in value.items() if not (key in names or _is_one(inner, names))
        }
    if isinstance(value, list):
        return [_without(inner, names) for inner in value if not _is_one(inner, names)]
    return value


def _is_one(value: Any, names: frozenset[str]) -> bool:
    text = value.get("content") if isinstance(value, dict) else value
    return isinstance(text, str) and text in names
