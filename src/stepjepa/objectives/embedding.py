"""Embed bare texts and records, at the readout of one side of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.errors import UserError
from stepjepa.data.records import Record
from stepjepa.data.row_error import Remedy, RowError
from stepjepa.objectives.inputs import PLACEHOLDER, Inputs, Text, as_inputs
from stepjepa.objectives.linear_map import LinearMap
from stepjepa.objectives.reading import ViewReader
from stepjepa.objectives.view_embeddings import SideEmbeddings
from stepjepa.objectives.view_tokenizer import ViewTokenizer
from stepjepa.views.layouts import message_text
from stepjepa.views.sequences import Kind, TokenizedRecord

if TYPE_CHECKING:
    pass

BLOCK = 10_000
"""Texts in a block: shared beginnings are computed once within a block."""


@dataclass(frozen=True)
class Embedder:
    """Embeds one side of pairs, from texts or records; made by :meth:`Jepa.embedder`.

    Within a call, equal texts and shared beginnings are computed once.
    """

    tokenizer: ViewTokenizer
    reader: ViewReader
    side: Kind
    raw: bool = False  # don't divide the vectors by their lengths
    linear_map: LinearMap | None = None  # the vectors are those behind it

    def __repr__(self) -> str:
        config, behind = self.reader.config, "" if self.linear_map is None else ", behind a linear map"
        return f"Embedder(side {self.side}, layer {config.jepa_layer}, pooling {config.pooling}{behind})"

    def __call__(self, inputs: Inputs) -> SideEmbeddings:
        """Embed texts, one row each, or records, one row for each view; see :meth:`Jepa.embed` for errors."""
        values = as_inputs(inputs, open_chats=self.tokenizer.open_chats)
        texts = [value for value in values if isinstance(value, Text)]
        records = [value for value in values if isinstance(value, Record)]
        embedded = self._records(records) if records else self._texts(texts)
        if self.linear_map is not None:
            embedded = replace(embedded, vectors=self.linear_map(embedded.vectors, self.side))
        return embedded if self.raw else replace(embedded, vectors=normalised(embedded.vectors))

    def _texts(self, texts: Sequence[Text]) -> SideEmbeddings:
        """Embed texts, equal ones once."""
        numbers: dict[str, int] = {}
        number_of = np.array([numbers.setdefault(text.text, len(numbers)) for text in texts], np.int64)
        first = dict[str, Text]()
        for text in texts:
            first.setdefault(text.text, text)
        distinct = [*first.values()]
        tokenized = [
            record
            for start in range(0, len(distinct), BLOCK)
            for record in self.tokenizer.texts(distinct[start : start + BLOCK])
        ]
        for text, record in zip(distinct, tokenized, strict=True):
            self._check_length(text, record)
        vectors = self.reader.side(tokenized, self.side).vectors[number_of]
        return SideEmbeddings(vectors, np.arange(len(texts)), np.ones(len(texts), np.int64))

    def _check_length(self, text: Text, record: TokenizedRecord) -> None:
        """Raise ``UserError`` for a text longer than ``max_length``, or than the model's positions."""
        view, config = record.pairs[0][self.tokenizer.place], self.reader.config
        length, positions = view.end - view.predictors, self.reader.packing.get("positions")
        with_predictors = length + (config.used_predictors if self.side == "source" else 0)
        fault = ""
        if positions is not None and with_predictors > positions:
            fault = f"{with_predictors} tokens, and the model has {positions} positions; shorten it"
        elif length > config.max_length:
            fault = f"{length} tokens, more than max_length {config.max_length}; shorten it or raise `max_length`"
        if fault:
            raise UserError(f"the text has {fault}", path=text.path, line=text.line)

    def _records(self, records: Sequence[Record]) -> SideEmbeddings:
        return self.reader.side(self._tokenized(records), self.side)

    def _tokenized(self, records: Sequence[Record]) -> list[TokenizedRecord]:
        """Tokenise records; UserError names one without a view of the side."""
        tokenized = self.tokenizer.tokenize_each(records)
        if self.tokenizer.open_chats:
            # A question alone is enough: its answer may be a tool call, or not trained.
            lacking = [number for number, tokens in enumerate(tokenized) if tokens is None or not tokens.all_pairs]
            questions = self.tokenizer.tokenize_each([question_alone(records[number]) for number in lacking])
            for number, question in zip(lacking, questions, strict=True):
                tokenized[number] = question
        return [self._with_view(record, tokens) for record, tokens in zip(records, tokenized, strict=True)]

    def _with_view(self, record: Record, tokenized: TokenizedRecord | None) -> TokenizedRecord:
        """Return the tokens of a record; UserError if it has no view."""
        if tokenized is not None and tokenized.all_pairs:
            return tokenized
        config = self.reader.config
        lacking = "reasoning step" if config.mode == "step-jepa" else "pair of a question and an answer"
        limit = f"with text within max_length {config.max_length}, so no {self.side} view to embed"
        skip = Remedy("bad_records", "pass `bad_records skip`")
        raise RowError(f"the record has no {lacking} {limit}", "leave it out", skip, path=record.path, line=record.line)

    def check(self, value: Text | Record) -> None:
        """Raise ``UserError`` for a text or a record that can't be embedded, without running the model."""
        if isinstance(value, Text):
            self._check_length(value, *self.tokenizer.texts([value]))
        else:
            self._tokenized([value])


def question_alone(record: Record) -> Record:
    """Return a record up to its first question with text, behind which a placeholder stands for the answer."""
    if record.views is not None:
        views = [source for source, _ in record.views if source.strip()]
        return replace(record, views=tuple((source, PLACEHOLDER) for source in views))
    questions = (
        number for number, message in enumerate(record.messages) if message["role"] == "user" and message_text(message)
    )
    first = next(questions, None)
    if first is None:
        return record
    return replace(record, messages=(*record.messages[: first + 1], {"role": "assistant", "content": PLACEHOLDER}))


def normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide vectors ``[R, D]`` by their lengths; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = (vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return unit
