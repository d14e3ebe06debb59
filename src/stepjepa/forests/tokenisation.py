"""Many texts to tokens with their characters, quickly: what stands between special tokens is tokenised once.

The rendered chat and the views of a record repeat each other and the system prompt between the same special tokens. A
tokenizer cuts its text at those first and looks at every piece by itself, so each piece is needed only once. Whether
it does is read from its own description (:func:`cuts_at_added_tokens`); texts are tokenised whole where it is not so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Parts of a tokenizer that treat a piece of text alike wherever it stands, as long as the condition on it holds.
_LOCAL: dict[str, tuple[str, ...]] = {
    "normalizer": ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"),
    "pre_tokenizer": ("Split", "ByteLevel", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"),
    "post_processor": ("TemplateProcessing", "ByteLevel"),
}
_PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}


class Encoded(NamedTuple):
    """Tokens of a text.

    Attributes:
        ids: ``[L]`` int32 token ids.
        offsets: ``[2, L]`` int32, first character of each token, and one past its last.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]


def cuts_at_added_tokens(description: dict[str, Any]) -> bool:
    """Whether a tokenizer gives a piece between two added tokens the same tokens wherever it stands.

    Args:
        description: of a fast tokenizer, as its ``tokenizer.json`` has it.
    """
    model = description["model"]
    if model.get("type") != "BPE" or model.get("dropout") or description["truncation"] or description["padding"]:
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
        self._added: dict[str, Encoded] = {}
        self._pattern: re.Pattern[str] | None = None
        # Pieces that came more than once among the texts before, such as a system prompt.
        self._known: dict[str, Encoded] = {}
        if self._backend is None or self._backend.encode_special_tokens:
            return
        added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        if added and cuts_at_added_tokens(json.loads(self._backend.to_str())):
            # The tokenizer, too, takes the first token in the text, and of those that begin there the longest.
            longest_first = sorted(added, key=len, reverse=True)
            self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
            self._added = {
                token: Encoded(np.asarray([index], np.int32), np.asarray([[0], [len(token)]], np.int32))
                for token, index in added.items()
            }

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """The tokens of some texts, no special token added."""
        if self._pattern is None:
            return self.encode_whole(texts)
        cut = [[piece for piece in self._pattern.split(text) if piece] for text in texts]
        counts = Counter(chain.from_iterable(cut))
        known = self._known | self._added
        missing = [piece for piece in counts if piece not in known]
        known.update(zip(missing, self._encode_pieces(missing), strict=True))
        self._known = {piece: known[piece] for piece, count in counts.items() if count > 1}
        return _join(cut, known)

    def encode_whole(self, texts: Sequence[str]) -> list[Encoded]:
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
        return [
            Encoded(np.asarray(ids, np.int32), np.asarray(offsets, np.int32).reshape(-1, 2).T)
            for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True)
        ]

    def _encode_pieces(self, pieces: list[str]) -> list[Encoded]:
        if not pieces:
            return []
        found = self._backend.encode_batch(pieces, add_special_tokens=False)
        ids = [encoding.ids for encoding in found]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        total = int(lengths.sum())
        # One array of all tokens: an array of each piece's list of pairs would cost more than the tokens themselves.
        joined = np.fromiter(chain.from_iterable(ids), np.int32, total)
        pairs = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in found))
        offsets = np.ascontiguousarray(np.fromiter(pairs, np.int32, 2 * total).reshape(-1, 2).T)
        ends = lengths.cumsum().tolist()
        starts = [0, *ends[:-1]]
        return [Encoded(joined[a:b], offsets[:, a:b]) for a, b in zip(starts, ends, strict=True)]


def _join(cut: Sequence[Sequence[str]], known: dict[str, Encoded]) -> list[Encoded]:
    """Texts from their pieces: tokens one after the other, characters counted on."""
    parts: list[Encoded] = []
    shifts: list[int] = []
    bounds = [0]
    total = 0
    for pieces in cut:
        position = 0
        for piece in pieces:
            part = known[piece]
            parts.append(part)
            shifts.append(position)
            position += len(piece)
            total += len(part.ids)
        bounds.append(total)
    if not parts:
        return [Encoded(np.empty(0, np.int32), np.empty((2, 0), np.int32)) for _ in cut]
    ids = np.concatenate([part.ids for part in parts])
    offsets = np.concatenate([part.offsets for part in parts], axis=1)
    offsets += np.repeat(np.asarray(shifts, np.int32), [len(part.ids) for part in parts])
    return [Encoded(ids[a:b], offsets[:, a:b]) for a, b in pairwise(bounds)]
