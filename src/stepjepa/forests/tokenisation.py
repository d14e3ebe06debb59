"""Many texts to tokens with their characters, quickly: what comes again and again is tokenised once.

The rendered chat and the views of a record repeat each other and the system prompt between the same special tokens. A
tokenizer cuts its text at those first and looks at every piece by itself, so each piece is needed only once. Whether
it does is read from its own description (:func:`cuts_at_added_tokens`); texts are tokenised whole where it is not so.
Pieces are parted further into words where it is known how (``words``), and each word is tokenised once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.forests.flat import as_bounds, expand
from stepjepa.forests.words import WordFinder, word_finder
from stepjepa.text.special import Spans, SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Parts of a tokenizer that treat a piece of text alike wherever it stands, as long as the condition on it holds.
_LOCAL: dict[str, tuple[str, ...]] = {
    "normalizer": ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"),
    "pre_tokenizer": ("Split", "ByteLevel", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"),
    "post_processor": ("TemplateProcessing", "ByteLevel"),
}
_PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}

# Words that are remembered, all of them forgotten when there are more: some hundred bytes each.
_MOST_WORDS = 2**17

Numbers = NDArray[np.int64]


class Tokens(NamedTuple):
    """A text as tokens.

    Attributes:
        ids: ``[L]`` token ids.
        starts: ``[L]`` first character of each token.
        ends: ``[L]`` one past its last character.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]

    def first_overlapping(self, character: int) -> int:
        """Index of the first token that reaches beyond a character position."""
        return int(self.ends.searchsorted(character, side="right"))

    def first_from(self, character: int) -> int:
        """Index of the first token that begins at or after a character position."""
        return int(self.starts.searchsorted(character, side="left"))


class Encoded(NamedTuple):
    """Tokens of ``T`` texts, those of one behind those of the other.

    Attributes:
        ids: ``[N]`` int32 token ids.
        starts: ``[N]`` int32, first character of each token in its own text.
        ends: ``[N]`` int32, one past its last character.
        bounds: ``[T + 1]`` where the tokens of each text begin, and where those of the last end.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    bounds: Numbers

    def text(self, index: int) -> Tokens:
        """One of the texts."""
        part = slice(self.bounds[index], self.bounds[index + 1])
        return Tokens(self.ids[part], self.starts[part], self.ends[part])

    def first_overlapping(self, texts: Numbers, characters: Numbers) -> Numbers:
        """``Tokens.first_overlapping`` of many texts and characters, each index counted within its text."""
        return self._search(self.ends, texts, characters, "right")

    def first_from(self, texts: Numbers, characters: Numbers) -> Numbers:
        """``Tokens.first_from`` of many texts and characters, each index counted within its text."""
        return self._search(self.starts, texts, characters, "left")

    def _search(self, places: NDArray[np.int32], texts: Numbers, characters: Numbers, side: Any) -> Numbers:
        # Characters of a text come after all those of the texts before it.
        numbers = np.repeat(np.arange(len(self.bounds) - 1) << 32, np.diff(self.bounds))
        return (numbers + places).searchsorted((texts << 32) + characters, side) - self.bounds[texts]


def describe(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What ``tokenizer.json`` says of a fast tokenizer, without its vocabulary, which would take seconds to write out.

    Args:
        tokenizer: not changed.
    """
    backend: Any = tokenizer.backend_tokenizer
    parts = {name: getattr(backend, name) for name in _LOCAL}
    return {
        "model": {"type": type(backend.model).__name__, "dropout": getattr(backend.model, "dropout", None)},
        "truncation": backend.truncation,
        "padding": backend.padding,
        "added_tokens": [
            {flag: getattr(token, flag) for flag in _FUSSY} for token in tokenizer.added_tokens_decoder.values()
        ],
        # What is pickled of a part is its description.
        **{name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()},
    }


def cuts_at_added_tokens(description: dict[str, Any]) -> bool:
    """Whether a tokenizer gives a piece between two added tokens the same tokens wherever it stands.

    Args:
        description: of a fast tokenizer, see :func:`describe`.
    """
    model = description["model"]
    if model["type"] != "BPE" or model["dropout"] or description["truncation"] or description["padding"]:
        return False
    if any(token[flag] for token in description["added_tokens"] for flag in _FUSSY):
        return False
    return all(_is_local(description[name], name) for name in _LOCAL)


# An added token that minds what stands beside it.
_FUSSY = ("lstrip", "rstrip", "single_word", "normalized")


def _is_local(part: dict[str, Any] | None, name: str) -> bool:
    if part is None:
        return True
    kind = part["type"]
    if kind == "Sequence":
        return all(_is_local(inner, name) for inner in part[_PARTS[name]])
    if kind == "ByteLevel":
        return not part["add_prefix_space"] if name == "pre_tokenizer" else not part["trim_offsets"]
    return kind in _LOCAL[name]


class TextEncoder:
    """Tokenises texts that hold their special tokens already.

    Args:
        tokenizer: fast; it is not changed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._pattern: re.Pattern[str] | None = None
        self._find: WordFinder | None = None
        self._added: dict[str, int] = {}
        self._words = _Table(self._encode_batch)
        self._special: SpecialTokens | None = None
        # The backend's own flag says only how it was last asked.
        if self._backend is None or getattr(tokenizer, "split_special_tokens", False):
            return
        self._special = SpecialTokens(tokenizer)
        added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        if not added:
            return
        description = describe(tokenizer)
        if cuts_at_added_tokens(description):
            # The tokenizer, too, takes the first token in the text, and of those that begin there the longest.
            longest_first = sorted(added, key=len, reverse=True)
            self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
            self._added = added
            self._find = word_finder(description)

    def encode(self, texts: Sequence[str], contents: Sequence[Spans] = ()) -> Encoded:
        """The tokens of some texts, no special token added.

        Args:
            texts: any number of them.
            contents: for each text where it holds what others wrote, in which no special token is one; nothing where
                all of the texts is the program's own.
        """
        special = self._special
        if special is not None and contents:
            both = enumerate(zip(texts, contents, strict=True))
            spelling = [index for index, each in both if special.spelt(*each)]
            if spelling:
                return self._encode_spelling(special, spelling, texts, contents)
        return self._encode_own(texts)

    def _encode_spelling(
        self, special: SpecialTokens, spelling: Sequence[int], texts: Sequence[str], contents: Sequence[Spans]
    ) -> Encoded:
        """The same where the contents of some texts, given by number, spell special tokens."""
        others = list(texts)
        for index in spelling:
            others[index] = ""
        found = self._encode_own(others)
        tokens = list(map(found.text, range(len(texts))))
        apart = _as_encoded(*special.encode([texts[i] for i in spelling], [contents[i] for i in spelling]))
        for number, index in enumerate(spelling):
            tokens[index] = apart.text(number)
        bounds = as_bounds(np.fromiter((len(each.ids) for each in tokens), np.int64, len(tokens)))
        ids, starts, ends = (np.concatenate(each) for each in zip(*tokens, strict=True))
        return Encoded(ids, starts, ends, bounds)

    def _encode_own(self, texts: Sequence[str]) -> Encoded:
        """Texts in which every special token is one."""
        if self._pattern is None:
            return self.encode_whole(texts)
        # Pieces and added tokens by turns; pieces may be empty.
        cut = list(map(self._pattern.split, texts))
        return _Table(self._encode_pieces, self._added).join(cut)

    def encode_whole(self, texts: Sequence[str]) -> Encoded:
        """The same, by the tokenizer's own way: every text as it is."""
        # The template has written the special tokens; the tokenizer must not add a second begin-of-text.
        batch = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            # Lengths are checked elsewhere; the tokenizer's own warning about its model would only confuse.
            verbose=False,
        )
        return _as_encoded(batch["input_ids"], batch["offset_mapping"])

    def _encode_pieces(self, pieces: list[str]) -> Encoded:
        """Pieces without added tokens."""
        if self._find is None:
            return self._encode_batch(pieces)
        if len(self._words) > _MOST_WORDS:
            self._words = _Table(self._encode_batch)
        return self._words.join(list(map(self._find, pieces)))

    def _encode_batch(self, pieces: list[str]) -> Encoded:
        """The same by the tokenizer itself."""
        found = self._backend.encode_batch(pieces, add_special_tokens=False)
        return _as_encoded([encoding.ids for encoding in found], [encoding.offsets for encoding in found])


class _Table(dict[str, int]):
    """Strings that were tokenised, each with its number.

    Args:
        encode: tokenises strings.
        added: tokens that stand for strings, with their ids.
    """

    def __init__(self, encode: Callable[[list[str]], Encoded], added: dict[str, int] | None = None) -> None:
        added = added or {}
        super().__init__(zip(added, range(len(added)), strict=True))
        self._encode = encode
        self._new: list[str] = []
        self._characters = np.fromiter(map(len, added), np.int64, len(added))
        ids = np.fromiter(added.values(), np.int32, len(added))
        ends = self._characters.astype(np.int32)
        self._tokens = Encoded(ids, np.zeros_like(ends), ends, np.arange(len(added) + 1))

    def __missing__(self, string: str) -> int:
        self._new.append(string)
        return self.setdefault(string, len(self))

    def join(self, texts: Sequence[Sequence[str]]) -> Encoded:
        """The tokens of texts, each given as strings one after the other."""
        # Looking a string up makes a number for it.
        numbers = np.fromiter(map(self.__getitem__, chain.from_iterable(texts)), np.int64)
        self._learn()
        strings = as_bounds(np.fromiter(map(len, texts), np.int64, len(texts)))
        before = as_bounds(self._characters[numbers])
        shifts = before[:-1] - np.repeat(before[strings[:-1]], np.diff(strings))
        begins = self._tokens.bounds[numbers]
        lengths = self._tokens.bounds[numbers + 1] - begins
        chosen = expand(begins, lengths)
        shift = np.repeat(shifts.astype(np.int32), lengths)
        return Encoded(
            self._tokens.ids[chosen],
            self._tokens.starts[chosen] + shift,
            self._tokens.ends[chosen] + shift,
            as_bounds(lengths)[strings],
        )

    def _learn(self) -> None:
        """Tokenise what is new."""
        if not self._new:
            return
        found, known = self._encode(self._new), self._tokens
        self._tokens = Encoded(
            np.concatenate([known.ids, found.ids]),
            np.concatenate([known.starts, found.starts]),
            np.concatenate([known.ends, found.ends]),
            np.concatenate([known.bounds, known.bounds[-1] + found.bounds[1:]]),
        )
        self._characters = np.concatenate([self._characters, list(map(len, self._new))])
        self._new = []


def _as_encoded(ids: Sequence[Sequence[int]], offsets: Sequence[Sequence[tuple[int, int]]]) -> Encoded:
    bounds = as_bounds(np.fromiter(map(len, ids), np.int64, len(ids)))
    total = int(bounds[-1])
    # One array of all tokens: an array of each text's list of pairs would cost more than the tokens themselves.
    joined = np.fromiter(chain.from_iterable(ids), np.int32, total)
    numbers = chain.from_iterable(chain.from_iterable(offsets))
    starts, ends = np.ascontiguousarray(np.fromiter(numbers, np.int32, 2 * total).reshape(-1, 2).T)
    return Encoded(joined, starts, ends, bounds)
