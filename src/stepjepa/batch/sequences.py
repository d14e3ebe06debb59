"""A record as tokens before and after a layout has placed it: views, and the token sequences that the model reads.

Everything that a training step needs of a record is a list of sequences, see ``layouts``; ``pack`` computes what
sequences have in common once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


def _no_labels() -> Ids:
    return np.empty((0, 2), np.int32)


def _no_positions() -> Ids:
    return np.empty(0, np.int32)


def _no_messages() -> Ids:
    return np.empty((0, 3), np.int32)


class View(NamedTuple):
    """A piece of a record that is embedded, as tokens."""

    ids: Ids  # [N] the text that it stands in: the main text, or a message alone in the chat template
    start: int  # first token of its content in ``ids``
    end: int  # one past the last one
    in_main: bool = False  # ``ids`` is the record's main text
    predictors: int = 0  # how many predictor tokens were tokenised with its content

    @property
    def content(self) -> Ids:
        """``[end - start]`` the content's tokens."""
        return self.ids[self.start : self.end]


class Pair(NamedTuple):
    """Two views, the first of which predicts the second (before ``reverse_pred``)."""

    first: View
    second: View


@dataclass(frozen=True, slots=True)
class TokenizedRecord:
    """A record as tokens, before any layout."""

    ids: Ids  # [N] the main text: the whole chat
    labels: Ids  # [L] its positions whose hidden state is trained to predict the next token
    prompt: Ids = field(default_factory=_no_positions)  # [M] the same in front of the tokens of user messages
    pairs: tuple[Pair, ...] = ()
    line: int = 0  # of the record in its file, counted from 1
    # [S, 3] of each message but the system's: first token, one past the last, 1 if the assistant says it.
    messages: Ids = field(default_factory=_no_messages)


Kind = Literal["source", "target"]
"""Of an embedding of a pair."""


class Readout(NamedTuple):
    """Where one of the two embeddings of a pair is read: the mean of tokens ``start`` to ``end``, often one."""

    pair: int  # number of the pair within the record
    kind: Kind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids that the model reads by themselves, with what is trained on in them and what is read from them.

    Attributes:
        ids: ``[N]`` the tokens.
        labels: ``[L, 2]`` position that is read, token id that it must predict. Explicit, because with predictor tokens
            inside the text the right token is not the next one.
        prompt: ``[M, 2]`` the same for tokens of the prompt.
        text: ``[K]`` positions of the record's own text, in its order; empty in all but the main sequence.
        start: ``[N]`` the first token that each token sees; None stands for zeros (ordinary causal attention).
        readouts: embeddings that are read from this sequence.
    """

    ids: Ids
    labels: Ids = field(default_factory=_no_labels)
    prompt: Ids = field(default_factory=_no_labels)
    text: Ids = field(default_factory=_no_positions)
    start: Ids | None = None
    readouts: tuple[Readout, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def main_sequence(record: TokenizedRecord) -> Sequence:
    """The whole text of a record with its labels: all that plain fine-tuning runs."""

    def with_next(positions: Ids) -> Ids:
        return np.stack([positions, record.ids[positions + 1]], axis=1)

    return Sequence(
        record.ids, with_next(record.labels), with_next(record.prompt), np.arange(len(record.ids), dtype=np.int32)
    )
