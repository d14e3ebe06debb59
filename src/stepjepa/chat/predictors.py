"""The predictor tokens ``<|predictor_1|>`` .. ``<|predictor_K|>`` of a tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PATTERN = re.compile(r"<\|predictor_(\d+)\|>")


def predictor_token(number: int) -> str:
    """The text of predictor token ``number``, counted from 1."""
    return f"<|predictor_{number}|>"


def add_predictor_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Add the predictor tokens 1 to ``count`` that a tokenizer lacks, as special tokens.

    Returns:
        The ids of all ``count`` tokens, in order.
    """
    known = tokenizer.get_added_vocab()
    missing = [predictor_token(number) for number in range(1, count + 1) if predictor_token(number) not in known]
    tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)
    return predictor_ids(tokenizer, count)


def predictor_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """The ids of ``<|predictor_1|>`` .. ``<|predictor_K|>``.

    Raises:
        ValueError: the tokenizer lacks one of them.
    """
    known = tokenizer.get_added_vocab()
    tokens = [predictor_token(number) for number in range(1, count + 1)]
    if missing := [token for token in tokens if token not in known]:
        raise ValueError(f"expected a tokenizer with {missing[0]}; call add_predictor_tokens(tokenizer, {count}) first")
    return [int(known[token]) for token in tokens]


def all_predictor_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of all predictor tokens that a tokenizer has; they must never be generated."""
    return sorted(index for token, index in tokenizer.get_added_vocab().items() if _PATTERN.fullmatch(token))


def saved_with_predictors(folder: str | Path) -> bool:
    """Whether the tokenizer files in a model's folder contain predictor tokens; the tokenizer is not loaded."""
    first = predictor_token(1).encode()
    files = (Path(folder) / name for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"))
    return any(first in file.read_bytes() for file in files if file.is_file())
