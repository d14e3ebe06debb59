"""Special tokens that training adds to a tokenizer, and texts to tokens without special tokens from users' contents.

A user's text may hold ``<|im_end|>``, which would end the turn. ``split_special_tokens`` of transformers alone splits
the template's own tokens, too. So these are replaced by stand-ins: tokens of the same length and with the same matching
options that are not special, known only to a copy of the tokenizer. The ids of the stand-ins are mapped back.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Spans = Sequence[tuple[int, int]]
"""Start and end (exclusive) of each content in a text, in characters, without overlaps."""

PERCEPTION = "<|perception|>"

# The published scripts end every row of the plain format with this token, whatever the tokenizer's own eos token is.
END_OF_TURN = "<|eot_id|>"


def predictor_token(number: int) -> str:
    """The text of predictor token ``number``, counted from 1."""
    return f"<|predictor_{number}|>"


def add_predictor_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Add the predictor tokens 1 to ``count`` that a tokenizer lacks, as special tokens; returns the ids of all."""
    _add(tokenizer, [predictor_token(number) for number in range(1, count + 1)])
    return predictor_ids(tokenizer, count)


def predictor_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """The ids of ``<|predictor_1|>`` .. ``<|predictor_K|>``; ValueError if the tokenizer lacks one of them."""
    known = tokenizer.get_added_vocab()
    tokens = [predictor_token(number) for number in range(1, count + 1)]
    if missing := [token for token in tokens if token not in known]:
        raise ValueError(f"expected a tokenizer with {missing[0]}; call add_predictor_tokens(tokenizer, {count}) first")
    return [int(known[token]) for token in tokens]


def all_predictor_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of all predictor tokens that a tokenizer has; they must never be generated."""
    known = tokenizer.get_added_vocab()
    return sorted(index for token, index in known.items() if re.fullmatch(r"<\|predictor_\d+\|>", token))


def add_plain_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Add ``<|perception|>`` and ``<|eot_id|>`` to a tokenizer that lacks them; returns the ids of the two."""
    _add(tokenizer, [PERCEPTION, END_OF_TURN])
    return [int(index) for index in tokenizer.convert_tokens_to_ids([PERCEPTION, END_OF_TURN])]


def _add(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> None:
    known = tokenizer.get_added_vocab()
    missing = [token for token in tokens if token not in known]
    tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)


class Tokens(NamedTuple):
    """A text as ``[L]`` tokens: their ids, the first character of each, and one past its last."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]

    def first_overlapping(self, character: int) -> int:
        """Index of the first token that reaches beyond a character position."""
        return int(self.ends.searchsorted(character, side="right"))

    def first_from(self, character: int) -> int:
        """Index of the first token that begins at or after a character position."""
        return int(self.starts.searchsorted(character, side="left"))


class TextTokenizer:
    """Tokenises rendered texts; a special token is one only where the template has written it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # A tokenizer that splits special tokens anyway has none to tell apart.
        added = {} if getattr(tokenizer, "split_special_tokens", False) else tokenizer.added_tokens_decoder
        self._special = {str(token): index for index, token in added.items() if token.special}
        # Of several tokens that match at one place the longest wins, as in the tokenizer.
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._copy: Any = None
        self._stands_for: dict[str, str] = {}  # special token -> its stand-in
        self._back: dict[int, int] = {}  # id of a stand-in -> id of the special token that it replaces

    def __call__(self, texts: Sequence[str], contents: Sequence[Spans]) -> list[Tokens]:
        """Tokenise texts, best many at once; ``contents`` are where each holds what others wrote."""
        both = list(zip(texts, contents, strict=True))
        spelt = [self.spelt(*each) for each in both]
        plain = iter(_tokenize(self.tokenizer, [text for text, here in zip(texts, spelt, strict=True) if not here]))
        replaced = iter(self._with_stand_ins([each for each, here in zip(both, spelt, strict=True) if here]))
        return [next(replaced if here else plain) for here in spelt]

    def spelt(self, text: str, contents: Spans) -> bool:
        """Whether a content of a text contains a special token or part of one."""
        return any(
            found.start() < stop and start < found.end()
            for found in self._pattern.finditer(text)
            for start, stop in contents
        )

    def _with_stand_ins(self, texts: Sequence[tuple[str, Spans]]) -> list[Tokens]:
        if texts and self._copy is None:
            self._make_copy()
        replaced = []
        for text, contents in texts:
            parts, position = [], 0
            # A message that the template leaves out has the empty span (0, 0).
            for start, stop in [*sorted(span for span in contents if span[0] < span[1]), (len(text), len(text))]:
                outside = self._pattern.sub(lambda found: self._stands_for[found[0]], text[position:start])
                parts += [outside, text[start:stop]]
                position = stop
            replaced.append("".join(parts))
        back = self._back
        found = _tokenize(self._copy, replaced, split_special_tokens=True)
        return [each._replace(ids=np.array([back.get(i, i) for i in each.ids.tolist()], np.int32)) for each in found]

    def _make_copy(self) -> None:
        """Copy the tokenizer and add stand-ins of private-use characters drawn at random, which texts hardly hold."""
        from tokenizers import AddedToken

        drawn = random.SystemRandom().sample(range(0x100000, 0x10FFFE), len(self._special))
        self._copy, added = copy.deepcopy(self.tokenizer), self.tokenizer.added_tokens_decoder
        for (token, index), code in zip(self._special.items(), drawn, strict=True):
            manners = {name: getattr(added[index], name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            self._stands_for[token] = chr(code) * len(token)
            self._copy.add_tokens([AddedToken(self._stands_for[token], special=False, **manners)])
            self._back[self._copy.convert_tokens_to_ids(self._stands_for[token])] = index


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> list[Tokens]:
    if not texts:
        return []
    found = tokenizer(
        texts,
        # The template has written the special tokens; the tokenizer must not add a second begin-of-text.
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        # Lengths are checked elsewhere; the tokenizer's own warning about its model would only confuse.
        verbose=False,
        **options,
    )
    tokens = []
    for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True):
        flat = np.fromiter(chain.from_iterable(offsets), np.int32, 2 * len(ids))
        tokens.append(Tokens(np.array(ids, np.int32), flat[::2].copy(), flat[1::2].copy()))
    return tokens
