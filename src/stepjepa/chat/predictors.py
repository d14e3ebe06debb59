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
    """Add the tokens that are missing, as special tokens.

    Args:
        tokenizer: changed in place.
        count: K.

    Returns:
        The ids of the K tokens, in the order 1..K.
    """
    wanted = [predictor_token(number) for number in range(1, count + 1)]
    known = tokenizer.get_added_vocab()
    missing = [token for token in wanted if token not in known]
    if missing:
        tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)
    return predictor_ids(tokenizer, count)


def predictor_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """The ids of ``<|predictor_1|>`` .. ``<|predictor_K|>``.

    Raises:
        ValueError: the tokenizer lacks one of them.
    """
    known = tokenizer.get_added_vocab()
    missing = [predictor_token(n) for n in range(1, count + 1) if predictor_token(n) not in known]
    if missing:
        raise ValueError(f"expected a tokenizer with {missing[0]}; call add_predictor_tokens(tokenizer, {count}) first")
    return [int(known[predictor_token(number)]) for number in range(1, count + 1)]


def all_predictor_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of every predictor token that a tokenizer has: what must never be generated."""
    return sorted(index for token, index in tokenizer.get_added_vocab().items() if _PATTERN.fullmatch(token))


def saved_with_predictors(folder: str | Path) -> bool:
    """Whether the tokenizer saved in a folder has predictor tokens; it is not loaded, so nothing heavy is imported.

    Args:
        folder: of a model.

    Raises:
        OSError: a file of the tokenizer can't be read.
    """
    first = predictor_token(1).encode()
    files = (Path(folder) / name for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"))
    return any(first in file.read_bytes() for file in files if file.is_file())
