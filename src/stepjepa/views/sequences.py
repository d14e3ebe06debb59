"""A record as tokens: its text and views as tokenised, and the token sequences that a layout makes of them."""

import hashlib
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]


def hash_tokens(ids: NDArray[np.integer]) -> int:
    """Hash token ids ``[N]`` to a signed 64-bit integer, the same on every machine."""
    digest = hashlib.blake2b(np.ascontiguousarray(ids, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def common_prefix(first: NDArray[np.integer], second: NDArray[np.integer]) -> int:
    """Return the length of the longest common prefix of the token ids ``first`` ``[N]`` and ``second`` ``[M]``."""
    shorter = min(len(first), len(second))
    differs = first[:shorter] != second[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _no_ids() -> Ids:
    return np.empty(0, np.int32)


def _no_labels() -> Ids:
    return np.empty((0, 2), np.int32)


class View(NamedTuple):
    """A piece of a record that is embedded, as tokens.

    Attributes:
        ids: ``[N]`` int32, the text that contains the view: the main text, or one message alone in the chat template.
        start: index in ``ids`` of the first token of the view's content.
        end: one past its last token.
        in_main: ``ids`` is the record's main text.
        predictors: number of predictor tokens that were tokenised with the content.
    """

    ids: Ids
    start: int
    end: int
    in_main: bool = False
    predictors: int = 0

    @property
    def content(self) -> Ids:
        """``[end - start]`` the content's tokens."""
        return self.ids[self.start : self.end]


class Pair(NamedTuple):
    """Two views; the first predicts the second, unless ``reverse_pred`` swaps them.

    Attributes:
        first: the source, such as a question, or a reasoning step.
        second: the target, such as its answer, or the next step.
    """

    first: View
    second: View


@dataclass(frozen=True, slots=True)
class TokenizedRecord:
    """A record as tokens, before a layout places its views.

    One text holds all trained turns of a chat that stand in it behind their own prompts. A template that rewrites
    earlier turns, as Qwen3's leaves out their thoughts, needs more than one: the ``further`` texts.

    Attributes:
        ids: ``[N]`` int32, the main text: the chat up to the end of a turn.
        labels: ``[L]`` positions whose hidden state is trained to predict the next token.
        prompt: ``[M]`` positions whose next token belongs to a user message.
        pairs: of the main text, in its order.
        line: line number of the record in its file, from 1.
        further: the other texts, in the order of their turns; these have none.
    """

    ids: Ids
    labels: Ids
    prompt: Ids = field(default_factory=_no_ids)
    pairs: tuple[Pair, ...] = ()
    line: int = 0
    further: tuple["TokenizedRecord", ...] = ()

    @property
    def texts(self) -> "tuple[TokenizedRecord, ...]":
        """All texts, each a record of its own."""
        return (self, *self.further)

    @property
    def all_pairs(self) -> tuple[Pair, ...]:
        """The pairs of all texts."""
        return tuple(pair for text in self.texts for pair in text.pairs)

    @property
    def length(self) -> int:
        """Number of tokens of all texts, without any sharing of prefixes."""
        return sum(len(text.ids) for text in self.texts)


class SampledRecord(NamedTuple):
    """One sampled record: its tokens, and this step's draw."""

    record: TokenizedRecord
    with_views: bool = True  # False in a step that loss dropout leaves without views
    rng_key: tuple[int, int] = (0, 0)  # epoch and index of the record: all that its random draws depend on


Kind = Literal["source", "target"]
"""The side of a pair."""


class Readout(NamedTuple):
    """One embedding of a pair: the mean of the hidden states of tokens ``start`` to ``end - 1``, often a single one.

    Attributes:
        pair: index of the pair in the record.
        kind: ``source`` or ``target``.
        start: index in the sequence of the first token that is averaged.
        end: one past the last one.
    """

    pair: int
    kind: Kind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids that the model reads as one text, with their labels and readouts.

    Attributes:
        ids: ``[N]`` int32 token ids.
        labels: ``[L, 2]`` int32: position that predicts, token id to predict. Explicit, because with predictor tokens
            inside the text the label is not the next token.
        prompt: ``[M, 2]`` the same for tokens of user messages.
        text: ``[K]`` positions of the record's own text; only in the main sequence.
        start: ``[N]`` the first token that each token sees; None for ordinary causal attention.
        readouts: where embeddings are read in it.
    """

    ids: Ids
    labels: Ids = field(default_factory=_no_labels)
    prompt: Ids = field(default_factory=_no_labels)
    text: Ids = field(default_factory=_no_ids)
    start: Ids | None = None
    readouts: tuple[Readout, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def main_sequence(record: TokenizedRecord) -> TokenSequence:
    """Make the sequence of a record's whole text with its labels: plain fine-tuning runs no other one."""
    labels, prompt = (np.stack([at, record.ids[at + 1]], axis=1) for at in (record.labels, record.prompt))
    return TokenSequence(record.ids, labels, prompt, np.arange(len(record.ids), dtype=np.int32))
