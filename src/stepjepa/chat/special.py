"""Tokenise special tokens that a message's content spells as ordinary text, and those of the template as special.

A user's text may hold ``<|im_end|>``, or even ``<|predictor_1|>``. Tokenised with the rest of the chat it would end the
turn. ``split_special_tokens`` of transformers alone is no remedy, since it splits the template's own tokens too. So the
template's tokens are replaced by stand-ins: tokens of the same length and with the same matching options that are not
special, known only to a copy of the tokenizer. All other special tokens are split then, and the ids of the stand-ins
are mapped back.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Spans = Sequence[tuple[int, int]]
"""Start and end (exclusive) of each content in a text, in characters, in order, without overlaps."""

# Private-use characters, which are in no vocabulary.
_STAND_INS = range(0x10FFFD, 0xFFFFF, -1)

_MANNERS = ("single_word", "lstrip", "rstrip", "normalized")


class SpecialTokens:
    """Distinguishes special tokens that a template has written from those that a content spells.

    Args:
        tokenizer: a fast tokenizer; it is not changed. Tokens that are added to it later are not known here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {str(token): index for index, token in added.items() if token.special}
        # Of several tokens that match at one place the longest wins, as in the tokenizer.
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        # A token that crosses one end of a content has its first or its last character in the content.
        self._ends = sorted({token[at] for token in longest_first for at in (0, -1)})

    def spelt(self, text: str, contents: Spans) -> bool:
        """Whether a content of a text contains a special token or part of one."""
        find = text.find
        if not any(find(end, start, stop) >= 0 for start, stop in contents for end in self._ends):
            return False
        assert self._pattern is not None
        return any(
            found.start() < stop and start < found.end()
            for found in self._pattern.finditer(text)
            for start, stop in contents
        )

    def encode(self, texts: Sequence[str], contents: Sequence[Spans]) -> tuple[list[list[int]], list[Any]]:
        """Tokenise texts whose contents spell at least one special token.

        Returns:
            For each text its token ids, and for each token its start and end (exclusive) in characters.
        """
        used = set().union(*map(set, texts))
        known = _COPIES.get(self._tokenizer)
        if known is None or known.special != self._special or not used.isdisjoint(known.stands_for.values()):
            known = _COPIES[self._tokenizer] = _make_copy(self._tokenizer, self._special, used)
        replaced = [self._replace(*each, known.stands_for) for each in zip(texts, contents, strict=True)]
        found = known.tokenizer(
            replaced,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids = [[known.back.get(index, index) for index in row] for row in found["input_ids"]]
        return ids, found["offset_mapping"]

    def _replace(self, text: str, contents: Spans, stands_for: Mapping[str, str]) -> str:
        """The text with stand-ins in place of the template's own special tokens."""
        assert self._pattern is not None
        parts, position = [], 0
        for start, stop in _around(text, contents):
            parts.append(text[position:start])
            parts.append(self._pattern.sub(lambda found: stands_for[found[0]] * len(found[0]), text[start:stop]))
            position = stop
        return "".join([*parts, text[position:]])


class _Copy(NamedTuple):
    """A copy of a tokenizer that has the stand-ins."""

    special: dict[str, int]  # special tokens of the tokenizer -> their ids
    stands_for: dict[str, str]  # special token -> the character that its stand-in repeats
    back: dict[int, int]  # id of a stand-in -> id of the special token that it replaces
    tokenizer: Any


# Copying a tokenizer with a large vocabulary takes a second, so copies are cached.
_COPIES: WeakKeyDictionary[Any, _Copy] = WeakKeyDictionary()


def _make_copy(tokenizer: Any, special: dict[str, int], used: set[str]) -> _Copy:
    """Copy a tokenizer and add stand-ins made of characters that are not in ``used``."""
    from tokenizers import AddedToken

    free = (character for character in map(chr, _STAND_INS) if character not in used)
    stands_for = dict(zip(special, free, strict=False))
    made, added = copy.deepcopy(tokenizer), tokenizer.added_tokens_decoder
    stand_ins = {}
    for token, character in stands_for.items():
        manners = {name: getattr(added[special[token]], name) for name in _MANNERS}
        stand_ins[token] = AddedToken(character * len(token), special=False, **manners)
    made.add_tokens(list(stand_ins.values()))
    back = {int(made.convert_tokens_to_ids(str(each))): special[token] for token, each in stand_ins.items()}
    return _Copy(special, stands_for, back, made)


def _around(text: str, contents: Spans) -> Iterator[tuple[int, int]]:
    """Spans of the template's own text, around the contents."""
    position = 0
    # A message that the template leaves out has the empty span (0, 0).
    for start, stop in sorted(span for span in contents if span[0] < span[1]):
        yield position, start
        position = stop
    yield position, len(text)
