"""A record as tokens before and after a layout has placed it: views, and the token sequences that the model reads."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]


def _empty(*shape: int) -> Any:
    """The default of a field."""
    return field(default_factory=lambda: np.empty(shape, np.int32))


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
    prompt: Ids = _empty(0)  # [M] the same in front of the tokens of user messages
    pairs: tuple[Pair, ...] = ()
    line: int = 0  # of the record in its file, counted from 1


class Item(NamedTuple):
    """A record on its way into a micro-batch."""

    record: TokenizedRecord
    with_views: bool = True  # not so in a step that loss dropout leaves without views
    draw: tuple[int, int] = (0, 0)  # epoch and index of the record, on which all that is drawn at random for it depends


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
    """Token ids that the model reads by themselves, with what is trained on in them and what is read from them."""

    ids: Ids  # [N]
    # [L, 2] position that is read, token id that it must predict. Explicit, because with predictor tokens inside the
    # text the right token is not the next one.
    labels: Ids = _empty(0, 2)
    prompt: Ids = _empty(0, 2)  # [M, 2] the same for tokens of the prompt
    text: Ids = _empty(0)  # [K] positions of the record's own text; empty in all but the main sequence
    start: Ids | None = None  # [N] the first token that each token sees; None for zeros (ordinary causal attention)
    readouts: tuple[Readout, ...] = ()  # embeddings that are read from this sequence

    def __len__(self) -> int:
        return len(self.ids)


def main_sequence(record: TokenizedRecord) -> Sequence:
    """The whole text of a record with its labels: all that plain fine-tuning runs."""
    labels, prompt = (np.stack([at, record.ids[at + 1]], axis=1) for at in (record.labels, record.prompt))
    return Sequence(record.ids, labels, prompt, np.arange(len(record.ids), dtype=np.int32))
