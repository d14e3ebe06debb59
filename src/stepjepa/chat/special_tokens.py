"""Special tokens of a tokenizer: predictor tokens, tokens of the plain format, every token that a text can spell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERCEPTION = "<|perception|>"

# The published scripts end every row of the plain format with this token, whatever the tokenizer's own eos token is.
END_OF_TURN = "<|eot_id|>"


def predictor_token(number: int) -> str:
    """Return the text of predictor token ``number``, counted from 1."""
    return f"<|predictor_{number}|>"


def add_predictor_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Add the predictor tokens 1 to ``count`` that a tokenizer lacks, as special tokens; returns the ids of all."""
    _add(tokenizer, [predictor_token(number) for number in range(1, count + 1)])
    return predictor_ids(tokenizer, count)


def predictor_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Return the ids of ``<|predictor_1|>`` .. ``<|predictor_K|>``; ValueError if the tokenizer lacks one of them."""
    added = tokenizer.get_added_vocab()
    tokens = [predictor_token(number) for number in range(1, count + 1)]
    if missing := [token for token in tokens if token not in added]:
        raise ValueError(f"expected a tokenizer with {missing[0]}; call add_predictor_tokens(tokenizer, {count}) first")
    return [int(added[token]) for token in tokens]


def all_predictor_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of all predictor tokens of a tokenizer; they must never be generated."""
    added = tokenizer.get_added_vocab()
    return sorted(index for token, index in added.items() if re.fullmatch(r"<\|predictor_\d+\|>", token))


def check_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``UserError`` for a special token, such as ``eos_token``, that the vocabulary lacks.

    It was set on the tokenizer in memory. It has no id, so that no text can be trained to end in it, and the tokenizer
    that is saved would be loaded with one token more.
    """
    for name, token in tokenizer.special_tokens_map.items():
        index = tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else 0
        if index is None or (index == tokenizer.unk_token_id and token != tokenizer.unk_token):
            remedy = f"add it with tokenizer.add_special_tokens({{{name!r}: {token!r}}}), or set one that it has"
            raise UserError(f"the tokenizer's {name} {shown(token)} is not in its vocabulary; {remedy}")


def matched_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the added tokens that a text can spell, the longest first, since one may begin with another.

    If a normaliser puts a blank in front of each text, the tokenizer searches for normalised tokens with that blank,
    and so never matches them.
    """
    added = {str(token): token for token in tokenizer.added_tokens_decoder.values() if str(token)}
    changed = [text for text, token in added.items() if token.normalized]
    ids = tokenizer([f"a{text}" for text in changed], add_special_tokens=False)["input_ids"] if changed else []
    lost = {
        text
        for text, token_ids in zip(changed, ids, strict=True)
        if token_ids[-1:] != [tokenizer.convert_tokens_to_ids(text)]
    }
    return sorted({*added, *filter(None, tokenizer.all_special_tokens)} - lost, key=len, reverse=True)


def add_plain_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Add ``<|perception|>`` and ``<|eot_id|>`` to a tokenizer that lacks them; returns the ids of the two."""
    _add(tokenizer, [PERCEPTION, END_OF_TURN])
    return [int(index) for index in tokenizer.convert_tokens_to_ids([PERCEPTION, END_OF_TURN])]


def _add(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> None:
    added = tokenizer.get_added_vocab()
    missing = [token for token in tokens if token not in added]
    tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)
