"""Texts to tokens, slowly: whole; or, where a content spells a special token, cut by hand at those of the template."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stepjepa.chat.tokens import Tokens


class SlowTokens(NamedTuple):
    """A text as tokens: their ids, the first character of each, and one past its last."""

    ids: Any
    starts: Any
    ends: Any

    def check(self, tokens: Tokens, text: str) -> None:
        """Assert that ``tokens`` are the same: their ids, and which of them begin or end where."""
        assert tokens.ids.tolist() == self.ids.tolist(), text
        for character in range(len(text) + 2):
            assert tokens.first_from(character) == np.searchsorted(self.starts, character, "left"), (text, character)
            assert tokens.first_overlapping(character) == np.searchsorted(self.ends, character, "right"), (
                text,
                character,
            )


# For each tokenizer how many tokens it has, itself, its special tokens, and a copy.
_KNOWN: dict[int, tuple[int, Any, dict[str, int], Any]] = {}


def _known(tokenizer: Any) -> tuple[dict[str, int], Any]:
    if id(tokenizer) not in _KNOWN or _KNOWN[id(tokenizer)][0] != len(tokenizer):
        special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        # transformers leaves a tokenizer that was asked to split special tokens in that state.
        _KNOWN[id(tokenizer)] = len(tokenizer), tokenizer, special, copy.deepcopy(tokenizer)
    return _KNOWN[id(tokenizer)][2:]


def slow_tokens(tokenizer: Any, text: str, contents: Sequence[tuple[int, int]]) -> SlowTokens:
    """What a text is to be, for tokenizers that look at every stretch between special tokens by itself.

    Args:
        tokenizer: whose tokens are meant.
        text: rendered.
        contents: where it holds what others wrote, in which no special token is one.
    """
    special, splitting = _known(tokenizer)
    begins = {token[0] for token in special}
    if not any(token in text[start:end] for start, end in contents for token in special):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return _as_tokens(encoding["input_ids"], encoding["offset_mapping"])
    inside = [any(start <= place < end for start, end in contents) for place in range(len(text))]
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []

    def add(start: int, end: int) -> None:
        encoding = splitting(
            text[start:end], add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )
        ids.extend(encoding["input_ids"])
        offsets.extend((start + first, start + last) for first, last in encoding["offset_mapping"])

    begin = place = 0
    while place < len(text):
        here = [token for token in special if text[place] in begins and text.startswith(token, place)]
        here = [token for token in here if not any(inside[place : place + len(token)])]
        if not here:
            place += 1
            continue
        token = max(here, key=len)
        add(begin, place)
        ids.append(special[token])
        offsets.append((place, place + len(token)))
        begin = place = place + len(token)
    add(begin, len(text))
    return _as_tokens(ids, offsets)


def _as_tokens(ids: list[int], offsets: list[tuple[int, int]]) -> SlowTokens:
    starts, ends = np.asarray(offsets, np.int32).reshape(-1, 2).T
    return SlowTokens(np.asarray(ids, np.int32), starts, ends)
