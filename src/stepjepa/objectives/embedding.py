"""Embed bare texts and records, at the readout of one side of a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import json_fault
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.batch.view_text import PairText, step_views
from stepjepa.chat.marks import Message, contents, locate
from stepjepa.chat.thought import without_thought
from stepjepa.chat.tokens import Tokens
from stepjepa.chat.turn_text import Rendered, Turn
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.row_error import Remedy, RowError
from stepjepa.data.steps import closed_step
from stepjepa.objectives.fitted import Fitted
from stepjepa.objectives.inputs import PLACEHOLDER, Inputs, Text, as_inputs
from stepjepa.objectives.reading import SIDES, ViewReader
from stepjepa.objectives.view_embeddings import ReadoutPlace, SideEmbeddings
from stepjepa.views.layouts import LAYOUTS, message_text
from stepjepa.views.sequences import Kind, Pair, TokenizedRecord, View

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Value = TypeVar("Value")

BLOCK = 10_000
"""Texts in a block: shared beginnings are computed once within a block."""

_PROBE = "\ue000p\ue001"  # private-use characters: no template writes them and no ordinary text holds them


class ViewTokenizer(RecordTokenizer):
    """Tokenises inputs of an embedder: a bare text is one view; a record of Step-JEPA gives every step.

    Args:
        tokenizer: as for ``RecordTokenizer``.
        config: settings for reading views, from ``embedding_config``.
        side: the side that is embedded.

    Attributes:
        system: the system message of training, if any; it precedes questions that are read behind a prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, side: Kind) -> None:
        if side not in SIDES:
            raise ValueError(f"side: expected 'source' or 'target', got {side!r}")
        super().__init__(tokenizer, config)
        self.system: list[Message] = []
        self.place = int((side == "target") != config.reverse_pred)
        """0 if the side is the first view of a pair, the question; 1 if it is the second one."""
        self._frame: tuple[str, str] | None = None  # the prompt before and behind the user's text

    @property
    def open_chats(self) -> bool:
        """Whether a chat may end with its question, without an answer."""
        return self.place == 0 and self.config.mode == "llm-jepa"

    @property
    def behind_prompt(self) -> bool:
        """Whether the view is read as a part of its chat, behind the messages before it."""
        return self.place == 0 and LAYOUTS[str(self.config.layout)].views_in_text

    def pairs(self, record: Record, turns: Sequence[Turn]) -> list[PairText]:
        if self.config.mode != "step-jepa":
            return super().pairs(record, turns)
        steps = step_views(turns[-1], self.config.step_separator, self.config.steps_from)
        # Each step is paired with itself, so that the last one, which predicts none, is embedded, too.
        return [PairText(len(turns) - 1, step, step) for step in steps]

    def texts(self, texts: Sequence[Text]) -> list[TokenizedRecord]:
        """Tokenise bare texts; UserError names file and line of a text that is empty, or is no view without a chat."""
        if self.config.mode == "step-jepa" and self.place == 0:
            side = "target" if self.config.reverse_pred else "source"
            first = texts[0] if texts else Text("")
            raise UserError(
                f"a {side} view of step-jepa is a step behind its chat, which a text alone does not have; pass records "
                f"('messages'), or `side {'source' if side == 'target' else 'target'}`",
                path=first.path,
                line=first.line,
            )
        views = []
        for text in texts:
            content = without_thought(text.text) if self.place == 1 else text.text
            if not content.strip():
                raise UserError("the text is empty; leave it out", path=text.path, line=text.line)
            if not content.isascii() and (fault := json_fault(content)) is not None:
                raise UserError(f"the text {fault}", path=text.path, line=text.line)
            views.append(content)
        if self.config.mode == "step-jepa":
            located = self._steps(views)
        elif self.behind_prompt:
            located = self._behind_prompt(texts, views)
        else:
            located = self._alone_in_template(texts, views)
        return [
            TokenizedRecord(view.ids, view.ids[:0], pairs=(self._pair(view),), line=text.line)
            for text, view in zip(texts, located, strict=True)
        ]

    def render_text(self, content: str, side: Kind) -> tuple[str, str]:
        """Render a bare text.

        Args:
            content: the text.
            side: the side that is embedded; a source has predictor tokens.

        Returns:
            The part of the rendered text before the bare text, and the bare text with its predictor tokens.
        """
        if self.behind_prompt:
            prompt, front = self._prompt(content), self.config.front_pred
            start, end = prompt.spans[-1]
            added = self.renderer.predictor_text if side == "source" else ""
            question = prompt.text[start:end]
            return prompt.text[:start], added + question if front else question + added
        view = self.renderer.alone(self.place, ("user", "assistant")[self.place], content)
        return view.text.text[: view.start], view.text.text[view.start : view.end]

    def _pair(self, view: View) -> Pair:
        """Make a pair with the view on the embedded side; its other side is never read."""
        other = view._replace(in_main=False)
        return Pair(view, other) if self.place == 0 else Pair(other, view)

    def _steps(self, texts: Sequence[str]) -> list[View]:
        """Tokenise steps alone, each closed by a separator."""
        closed = [closed_step(text, self.config.step_separator) for text in texts]
        # Without a blank in front: in training a step follows another text.
        tokens = self._texts.without_dummy_blank(closed, [((0, len(text)),) for text in closed])
        return [View(text_tokens.ids, 0, len(text_tokens.ids), in_main=True) for text_tokens in tokens]

    def _alone_in_template(self, texts: Sequence[Text], contents: Sequence[str]) -> list[View]:
        """Tokenise texts as messages alone in the template."""
        role = ("user", "assistant")[self.place]
        views = [
            self._naming(text, partial(self.renderer.alone, self.place, role, content))
            for text, content in zip(texts, contents, strict=True)
        ]
        rendered = [view.text for view in views]
        tokens = self._texts([text.text for text in rendered], [text.spans for text in rendered])
        return [view.located(text_tokens, text_tokens.ids) for view, text_tokens in zip(views, tokens, strict=True)]

    def _behind_prompt(self, texts: Sequence[Text], contents: Sequence[str]) -> list[View]:
        """Tokenise questions behind the system prompt of training."""
        prompts = [
            self._naming(text, partial(self._prompt, content)) for text, content in zip(texts, contents, strict=True)
        ]
        plain_spans = [self.template.prompt_own(self._chat(content)) for content in contents]
        tokens = self._texts([prompt.text for prompt in prompts], plain_spans)
        return [_located(text_tokens, *prompt.spans[-1]) for prompt, text_tokens in zip(prompts, tokens, strict=True)]

    def _chat(self, content: str) -> list[Message]:
        system = [] if self.config.plain else self.system
        return [*system, {"role": "user", "content": content}]

    def _prompt(self, content: str) -> Rendered:
        """Render the prompt of a question, with the span of the question in it."""
        if self._frame is None:
            probe = self.template.prompt(self._chat(_PROBE))
            before, separator, behind = probe.rpartition(_PROBE)
            self._frame = (before, behind) if separator else ("", "")
        before, behind = self._frame
        text = self.template.prompt(self._chat(content))
        for part in (content, content.strip()):
            if text == f"{before}{part}{behind}":
                return Rendered(text, ((len(before), len(before) + len(part)),))
        # The template renders something else around this text.
        chat = self._chat(content)
        span = contents(locate(self.template.prompt, chat, text, [len(chat) - 1]), len(chat))[-1]
        if span is None:
            raise UserError(
                "the chat template rewrites the text, so that it can't be found; train with `layout separate`"
            )
        return Rendered(text, (span,))

    def _naming(self, text: Text, render: Callable[[], Value]) -> Value:
        """Call ``render``; add file and line of the text to its error."""
        try:
            return render()
        except UserError as error:
            raise error.at(text.path, text.line) from None


def _located(tokens: Tokens, start: int, end: int) -> View:
    return View(tokens.ids, tokens.first_overlapping(start), tokens.first_from(end), in_main=True)


@dataclass(frozen=True)
class Embedder:
    """Embeds one side of pairs, from texts or records; made by :meth:`Jepa.embedder`.

    Within a call, equal texts and shared beginnings are computed once.

    Attributes:
        tokenizer: of texts and records.
        reader: runs the model, and says where embeddings are read.
        side: ``source`` or ``target``.
        raw: don't divide the vectors by their lengths.
        fitted: the map that the vectors are behind; None for those of the model.
    """

    tokenizer: ViewTokenizer
    reader: ViewReader
    side: Kind
    raw: bool = False
    fitted: Fitted | None = None

    def __repr__(self) -> str:
        behind = "" if self.fitted is None else f", behind {self.fitted.kind}"
        return f"Embedder(side {self.side}, layer {self.place.layer}, pooling {self.place.pooling}{behind})"

    @property
    def place(self) -> ReadoutPlace:
        """Where embeddings are read."""
        return self.reader.place if self.fitted is None else self.fitted.place

    def __call__(self, inputs: Inputs) -> SideEmbeddings:
        """Embed texts, one row each, or records, one row for each view; see :meth:`Jepa.embed` for errors."""
        values = as_inputs(inputs, open_chats=self.tokenizer.open_chats)
        texts = [value for value in values if isinstance(value, Text)]
        records = [value for value in values if isinstance(value, Record)]
        embedded = self._records(records) if records else self._texts(texts)
        if self.fitted is not None:
            embedded = replace(embedded, vectors=self.fitted(embedded.vectors, self.side))
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
        vectors = self.reader.side(tokenized, self.side, self.place).vectors[number_of]
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
        return self.reader.side(self._tokenized(records), self.side, self.place)

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
