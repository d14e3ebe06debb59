"""Tokenise texts with the position of each token; special tokens that a user spells stay plain text.

A text may contain ``<|im_end|>``, which would end the turn. ``split_special_tokens`` of transformers alone splits
the template's own tokens, too. So these are replaced by stand-ins: tokens of the same length and with the same matching
options that are not special, known only to a copy of the tokenizer. The ids of the stand-ins are mapped back.
"""

from __future__ import annotations

import copy
import json
import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, compress, pairwise
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Spans = Sequence[tuple[int, int]]
"""Start and end (exclusive) of each content in a text, in characters, without overlaps."""

_MOST_PIECES = 10_000  # most pieces of texts that are remembered


class Piece(NamedTuple):
    """A piece of a text as ``[L]`` tokens."""

    ids: NDArray[np.int32]
    offsets: Sequence[tuple[int, int]]  # of each token the first character in the piece, and one past its last
    length: int  # number of characters


Pieces = Sequence[Piece]
"""The pieces of a text, in order."""


class Tokens:
    """A text as ``[L]`` tokens: their ``ids``, and the characters of each.

    ``pieces`` are those of the text, in order. A character is looked up in the piece that holds it, so that the offsets
    of the pieces need not be joined.
    """

    __slots__ = ("_ends", "ids", "pieces")

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.ids = pieces[0].ids if len(pieces) == 1 else np.concatenate([piece.ids for piece in pieces])
        self._ends: tuple[list[int], list[int]] | None = None

    def first_overlapping(self, character: int) -> int:
        """Return the index of the first token that reaches beyond a character position."""
        return self._search(bisect_right, character, _END)

    def first_from(self, character: int) -> int:
        """Return the index of the first token that begins at or after a character position."""
        return self._search(bisect_left, character, _START)

    def _search(self, bisect: Callable[..., int], character: int, side: Callable[[tuple[int, int]], int]) -> int:
        """Return the index of a token by bisection over one side of the offsets of the piece that has the character."""
        characters, tokens = self._piece_ends()
        number = bisect(characters, character)
        if number == len(self.pieces):
            return len(self.ids)
        begin = characters[number - 1] if number else 0
        place = bisect(self.pieces[number].offsets, character - begin, key=side)
        return place + (tokens[number - 1] if number else 0)

    def _piece_ends(self) -> tuple[list[int], list[int]]:
        """Return the end of each piece in the text: in characters, and in tokens."""
        if self._ends is None:
            lengths, counts = [piece.length for piece in self.pieces], [len(piece.ids) for piece in self.pieces]
            self._ends = list(accumulate(lengths)), list(accumulate(counts))
        return self._ends


_START, _END = itemgetter(0), itemgetter(1)


class TurnText(Protocol):
    """A turn as text, see ``turn_text.Turn``: its prompt is ``text[:answer]``."""

    @property
    def text(self) -> str: ...
    @property
    def answer(self) -> int: ...
    @property
    def own(self) -> Spans: ...
    @property
    def prompt_own(self) -> Spans: ...


class TurnTokens(NamedTuple):
    """A turn as tokens: its prompt, as a server tokenises it, and its answer."""

    tokens: Tokens
    answer: int  # the answer's first token
    is_apart: bool = False  # the answer was tokenised alone, since a token would join it with the prompt
    special: Spans = ()  # where the text spells special tokens, the template's own included


class TextTokenizer:
    """Tokenises rendered texts; special tokens spelled in the contents of messages stay plain text.

    A text is cut before added tokens, across which no token can reach, and equal pieces are tokenised once: the prompts
    of a chat's turns repeat all earlier turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, Piece] = {}
        self._added, self._cuts = _cuts(tokenizer)
        self._undecorated: TextTokenizer | None = None
        # A tokenizer that splits special tokens anyway needs no distinction.
        added = {} if getattr(tokenizer, "split_special_tokens", False) else tokenizer.added_tokens_decoder
        self._special = {str(token): index for index, token in added.items() if token.special}
        # If several tokens match at one place the longest wins, as in the tokenizer.
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._copy: Any = None
        self._stands_for: dict[str, str] = {}  # special token -> its stand-in
        self._back: dict[int, int] = {}  # id of a stand-in -> id of the special token that it replaces

    def __call__(self, texts: Sequence[str], contents: Sequence[Spans]) -> list[Tokens]:
        """Tokenise texts, which is faster for many at once; ``contents`` are the spans of user-written text in each."""
        inputs = list(zip(texts, contents, strict=True))
        # Whether the user-written text of each spells a special token.
        spells = [overlap(self.special_spans(text), spans) if spans else False for text, spans in inputs]
        cut = [self._cut(text) for text, spells_one in zip(texts, spells, strict=True) if not spells_one]
        plain = map(Tokens, self._of_pieces(cut))
        replaced = iter(self._with_stand_ins(list(compress(inputs, spells))))
        return [next(replaced if spells_one else plain) for spells_one in spells]

    def turns(self, turns: Sequence[TurnText]) -> list[TurnTokens]:
        """Tokenise turns. If the tokens of the full turn begin with those of its prompt, the rest is the answer.

        Otherwise a token spans prompt and answer, which can't happen in a server; then the answer is tokenised alone.
        """
        special = [self.special_spans(turn.text) for turn in turns]
        # If no content spells a special token, the pieces of the prompt are the first ones of the full turn.
        is_plain = [
            not turn.prompt_own and not overlap(spans, turn.own) for turn, spans in zip(turns, special, strict=True)
        ]
        plain = iter(self._turns_in_pieces([turn for turn, is_one in zip(turns, is_plain, strict=True) if is_one]))
        others = iter(self._turns_by_text([turn for turn, is_one in zip(turns, is_plain, strict=True) if not is_one]))
        tokens = []
        for turn, spans, is_one in zip(turns, special, is_plain, strict=True):
            prompt, full = next(plain if is_one else others)
            count = sum([len(piece.ids) for piece in prompt])
            if _begins(full, prompt):
                tokens.append(TurnTokens(Tokens(full), count, False, spans))
            else:
                own = [(start - turn.answer, end - turn.answer) for start, end in turn.own]
                (answer,) = self.without_dummy_blank([turn.text[turn.answer :]], [own])
                tokens.append(TurnTokens(Tokens([*prompt, *answer.pieces]), count, True, spans))
        return tokens

    def _turns_by_text(self, turns: Sequence[TurnText]) -> list[tuple[Pieces, Pieces]]:
        """Tokenise prompt and full text of turns that may spell special tokens."""
        prompts = self([turn.text[: turn.answer] for turn in turns], [turn.prompt_own for turn in turns])
        full_texts = self([turn.text for turn in turns], [(*turn.prompt_own, *turn.own) for turn in turns])
        return [(prompt.pieces, full.pieces) for prompt, full in zip(prompts, full_texts, strict=True)]

    def _turns_in_pieces(self, turns: Sequence[TurnText]) -> list[tuple[Pieces, Pieces]]:
        """Tokenise prompt and full text of turns whose special tokens were all written by the template."""
        pieces = self._of_pieces([part for turn in turns for part in self._cut_turn(turn.text, turn.answer)])
        return list(zip(pieces[::2], pieces[1::2], strict=True))

    def without_dummy_blank(self, texts: Sequence[str], contents: Sequence[Spans]) -> list[Tokens]:
        """Tokenise texts without the blank that some tokenizers put before every text."""
        if self._undecorated is None:
            self._undecorated = TextTokenizer(_without_dummy_blank(self.tokenizer))
        return self._undecorated(texts, contents)

    def _of_pieces(self, texts: Sequence[Sequence[str]]) -> list[Pieces]:
        """Tokenise texts that were cut into pieces, equal pieces once."""
        missing = list({piece for pieces in texts for piece in pieces if piece not in self._known})
        if len(self._known) + len(missing) > _MOST_PIECES:
            self._known = {}
            missing = list({piece for pieces in texts for piece in pieces})
        known = self._known
        known.update(zip(missing, _tokenize(self.tokenizer, missing), strict=True))
        return [[known[piece] for piece in pieces] for pieces in texts]

    def _cut(self, text: str) -> list[str]:
        """Cut a text, whose special tokens were all written by the template, before added tokens."""
        starts = [match.start() for match in self._added.finditer(text) if match[0] in self._cuts]
        return _sliced(text, starts, len(text))

    def _cut_turn(self, text: str, answer: int) -> tuple[list[str], list[str]]:
        """Cut the prompt of a turn, ``text[:answer]``, and the whole of it, as :meth:`_cut`."""
        safe, starts, within, last = self._cuts, list[int](), 0, 0
        for match in self._added.finditer(text):
            start, end = match.span()
            if match[0] in safe:
                starts.append(start)
            if end <= answer:
                within, last = len(starts), end
        # At the prompt's end a shorter token may match than in the whole.
        own = [match.start() for match in self._added.finditer(text, last, answer) if match[0] in safe]
        return _sliced(text, [*starts[:within], *own], answer), _sliced(text, starts, len(text))

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of the special tokens that a text spells."""
        return [match.span() for match in self._special_pattern.finditer(text)]

    def _with_stand_ins(self, texts: Sequence[tuple[str, Spans]]) -> list[Tokens]:
        if texts and self._copy is None:
            self._make_copy()
        replaced = []
        for text, contents in texts:
            parts, position = [], 0
            # A message that the template leaves out has the empty span (0, 0).
            for start, stop in [*sorted(span for span in contents if span[0] < span[1]), (len(text), len(text))]:
                outside = self._special_pattern.sub(lambda match: self._stands_for[match[0]], text[position:start])
                parts += [outside, text[start:stop]]
                position = stop
            replaced.append("".join(parts))
        back = self._back
        tokens = _tokenize(self._copy, replaced, split_special_tokens=True)
        own = (np.array([back.get(i, i) for i in text_tokens.ids.tolist()], np.int32) for text_tokens in tokens)
        return [Tokens([text_tokens._replace(ids=ids)]) for text_tokens, ids in zip(tokens, own, strict=True)]

    def _make_copy(self) -> None:
        """Copy the tokenizer and add stand-ins of random private-use characters, which hardly any text contains."""
        from tokenizers import AddedToken

        drawn = random.SystemRandom().sample(range(0x100000, 0x10FFFE), len(self._special))
        self._copy, added = copy.deepcopy(self.tokenizer), self.tokenizer.added_tokens_decoder
        for (token, index), code in zip(self._special.items(), drawn, strict=True):
            matching = {name: getattr(added[index], name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            self._stands_for[token] = chr(code) * len(token)
            self._copy.add_tokens([AddedToken(self._stands_for[token], special=False, **matching)])
            self._back[self._copy.convert_tokens_to_ids(self._stands_for[token])] = index


def _cuts(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str], set[str]]:
    """Return a pattern of all added tokens, and those before which a text can be cut without changing its tokens."""
    added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
    longest_first = sorted(filter(None, added), key=len, reverse=True)
    # A tokenizer that splits special tokens does not match them first.
    splits = getattr(tokenizer, "split_special_tokens", False)
    safe = (text for text, token in added.items() if not (token.lstrip or token.single_word or token.normalized))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)"), set() if splits else set(safe)


def _without_dummy_blank(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer that puts no blank before a text; the tokenizer itself if it puts none."""
    from tokenizers import Tokenizer

    backend: Any = tokenizer.backend_tokenizer
    description = json.loads(backend.to_str())

    def strip(part: Any) -> bool:
        """Remove the steps that write a blank from a part of the description; return whether there were any."""
        if isinstance(part, list):
            return any(list(map(strip, part)))
        if not isinstance(part, dict):
            return False
        before = dict(part)
        if part.get("type") == "Prepend":
            part["prepend"] = ""
        if "prepend_scheme" in part:
            part["prepend_scheme"] = "never"
        if part.get("type") in ("ByteLevel", "Metaspace") and "add_prefix_space" in part:
            part["add_prefix_space"] = False
        return any(list(map(strip, part.values()))) or part != before

    if not strip([description[name] for name in ("normalizer", "pre_tokenizer")]):
        return tokenizer
    changed: Any = copy.deepcopy(tokenizer)
    changed._tokenizer = Tokenizer.from_str(json.dumps(description))
    return changed


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``UserError`` for a slow tokenizer, which returns no positions of tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError("the tokenizer has no fast version, and token positions need one; convert it first")


def overlap(tokens: Spans, contents: Spans) -> bool:
    """Return whether a content of a text contains one of its special tokens, or a part of one."""
    if len(tokens) * len(contents) < 64:
        return any(start < end and start < token[1] and token[0] < end for token in tokens for start, end in contents)
    spans = sorted(span for span in contents if span[0] < span[1])
    starts, ends = [start for start, _ in spans], list(accumulate((end for _, end in spans), max))
    for start, end in tokens if spans else ():
        before = bisect_left(starts, end)  # number of contents that begin before the token ends
        if before and ends[before - 1] > start:
            return True
    return False


def _sliced(text: str, starts: Sequence[int], end: int) -> list[str]:
    """Cut ``text[:end]`` at some characters."""
    places = [0, *(start for start in starts if start), end]
    return [text[begin:behind] for begin, behind in pairwise(places)]


def _begins(full: Pieces, prompt: Pieces) -> bool:
    """Return whether the tokens of a turn begin with those of its prompt; equal pieces have equal tokens."""
    *shared, last = prompt
    if len(shared) < len(full) and all(map(is_, shared, full)):
        ids, begin = full[len(shared)].ids, last.ids
    else:
        ids, begin = Tokens(full).ids, Tokens(prompt).ids
    return len(begin) <= len(ids) and bool((ids[: len(begin)] == begin).all())


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: bool) -> list[Piece]:
    """Tokenise texts as the tokenizer does, without special tokens around them."""
    if not texts:
        return []
    # The call for the first text sets up the backend; the others go to the backend alone, in two thirds of the time.
    slowly = texts[:1] if _passes_texts_on(type(tokenizer)) else texts
    encoding = tokenizer(
        slowly,
        # The template writes the special tokens; the tokenizer must not add a second begin-of-text.
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        # Lengths are checked elsewhere, so the tokenizer must not warn of its model's length.
        verbose=False,
        **options,
    )
    backend: Any = tokenizer.backend_tokenizer
    encodings = [
        *zip(encoding["input_ids"], encoding["offset_mapping"], strict=True),
        *(
            (encoded.ids, encoded.offsets)
            for encoded in backend.encode_batch(texts[len(slowly) :], add_special_tokens=False)
        ),
    ]
    return [
        Piece(np.array(ids, np.int32), offsets, len(text))
        for text, (ids, offsets) in zip(texts, encodings, strict=True)
    ]


def _passes_texts_on(tokenizer_class: Any) -> bool:
    """Return whether a class of tokenizers passes texts to its backend unchanged, as nearly all do."""
    from transformers import PreTrainedTokenizerFast

    usual: Any = PreTrainedTokenizerFast
    methods = ((cls.__call__, cls._encode_plus, cls._convert_encoding) for cls in (tokenizer_class, usual))
    return all(map(is_, *methods))
