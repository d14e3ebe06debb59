"""What a record is made of before and after a layout has placed it: views, and token sequences.

A sequence is a run of token ids that the model reads by itself. Everything that a training step needs of a record is a
list of such sequences, see ``layouts``; that sequences with a common beginning are computed once is the business of
``pack``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

NO_LABELS: Ids = np.empty((0, 2), np.int32)
NO_PLACES: Ids = np.empty(0, np.int32)
NO_MESSAGES: Ids = np.empty((0, 3), np.int32)


@dataclass(frozen=True, slots=True)
class View:
    """A piece of a record that is embedded, as tokens.

    Attributes:
        ids: ``[N]`` the text that the view stands in: the main text, or a message alone in the chat template.
        start: first token of the view's content in ``ids``.
        end: one past the last token of its content.
        in_main: ``ids`` is the record's main text.
        predictors: how many tokens of the content are predictor tokens that were tokenised with it.
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
    """Two views, the first of which predicts the second (before ``reverse_pred``)."""

    first: View
    second: View


@dataclass(frozen=True, slots=True)
class TokenizedRecord:
    """A record as tokens, before any layout.

    Attributes:
        ids: ``[N]`` the main text: the whole chat.
        labels: ``[L]`` positions of the main text whose hidden state is trained to predict the token behind them.
        prompt: ``[M]`` positions in front of the tokens of user messages, for a loss on the prompt.
        pairs: of views.
        line: of the record in its file, counted from 1; 0 if there is no file.
        messages: ``[S, 3]`` of each message of user and assistant the first token of its content in the main text, one
            past the last, and whether it is the assistant's (1) or the user's (0).
    """

    ids: Ids
    labels: Ids
    prompt: Ids = field(default_factory=lambda: NO_PLACES)
    pairs: tuple[Pair, ...] = ()
    line: int = 0
    messages: Ids = field(default_factory=lambda: NO_MESSAGES)


class Readout(NamedTuple):
    """Where an embedding is read.

    Attributes:
        pair: number of the pair within the record.
        kind: which of the two embeddings of the pair it is.
        start: first of the tokens that are averaged.
        end: one past the last of them.
    """

    pair: int
    kind: Literal["source", "target"]
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
        text: ``[K]`` places of the record's own text, in its order; empty in all but the main sequence.
        start: ``[N]`` the first token that each token sees; None stands for zeros (ordinary causal attention).
        readouts: embeddings that are read from this sequence.
    """

    ids: Ids
    labels: Ids = field(default_factory=lambda: NO_LABELS)
    prompt: Ids = field(default_factory=lambda: NO_LABELS)
    text: Ids = field(default_factory=lambda: NO_PLACES)
    start: Ids | None = None
    readouts: tuple[Readout, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def main_sequence(record: TokenizedRecord) -> Sequence:
    """The whole text of a record with its labels: all that plain fine-tuning runs."""
    return Sequence(
        record.ids,
        labels=_with_next(record.ids, record.labels),
        prompt=_with_next(record.ids, record.prompt),
        text=np.arange(len(record.ids), dtype=np.int32),
    )


def _with_next(ids: Ids, positions: Ids) -> Ids:
    return np.stack([positions, ids[positions + 1]], axis=1) if len(positions) else NO_LABELS
