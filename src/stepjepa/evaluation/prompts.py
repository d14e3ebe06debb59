"""Render and tokenise records for evaluation: the prompt, the right answer, and continuations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stepjepa.chat.template import ChatTemplate, PlainTemplate
from stepjepa.chat.tokens import Spans, TextTokenizer, Tokens
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.run_folder import trained_objective
from stepjepa.tasks.base import Continuation, record_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Template = ChatTemplate | PlainTemplate


def make_template(tokenizer: Any, *, plain: bool) -> Template:
    """The chat template of a tokenizer, or with ``plain`` the form without a chat; UserError if it has none."""
    return PlainTemplate(tokenizer) if plain else ChatTemplate(tokenizer)


def trained_plain(model_path: str | os.PathLike[str]) -> bool:
    """Whether the run.json of a model says that it was trained without a chat format."""
    return bool((trained_objective(model_path) or {}).get("plain", False))


class Span(NamedTuple):
    """A row of tokens whose tokens from ``start`` on are scored by their likelihood."""

    ids: list[int]
    start: int
    """Position of the first scored token, 1 or more."""

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return len(self.ids) - self.start


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenised record."""

    index: int
    """Position in the test file, from 0."""
    prompt: str
    """The prompt as text."""
    prompt_ids: list[int]
    gold: Span
    """Prompt, right answer and end of turn; answer and end of turn are scored."""


class ShownTexts:
    """Tokenises rendered texts; special tokens spelt inside message contents are tokenised as ordinary text.

    Args:
        tokenizer: a fast tokenizer; it is not changed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._texts = TextTokenizer(tokenizer)

    def tokenize(self, text: str, contents: Spans) -> Tokens:
        """The tokens of a text with message contents at ``contents``."""
        return self._texts([text], [contents])[0]

    def span(self, text: str, contents: Spans, start: int, end: int) -> Span:
        """The tokens of a text that begin before character ``end``, scored from the token that contains ``start``."""
        tokens = self.tokenize(text, contents)
        # The first token of a row has no prediction.
        return Span(tokens.ids[: tokens.first_from(end)].tolist(), max(1, tokens.first_overlapping(start)))


def make_example(index: int, record: Record, texts: ShownTexts, template: Template) -> Example:
    """Render and tokenise a record as in training; UserError with its line if the template can't render it."""
    try:
        if not record.answer.strip():
            raise UserError("the last message is a tool call, which has no text to be compared; leave the record out")
        prompt = template.render_prompt(record.messages[:-1], record.tools)
        whole = template.render(record.messages, record.tools)
    except UserError as error:
        raise record_error(record, str(error)) from None
    prompt_ids = texts.tokenize(prompt.text, prompt.spans).ids.tolist()
    gold = texts.span(whole.text, whole.spans, whole.spans[-1][0], whole.turn_ends[-1])
    return Example(index, prompt.text, prompt_ids, gold)


def continuation_spans(
    record: Record, continuations: Sequence[Continuation], shown: ShownTexts, template: Template
) -> list[Span]:
    """Rows that score the continuations of a record, each after the record's prompt or after its own context."""
    # A rendered prompt has its special tokens; a context of its own needs the one that begins texts.
    begin = shown.tokenizer.bos_token or ""
    spans = []
    for continuation in continuations:
        if continuation.context is None:
            answer = {"role": "assistant", "content": continuation.text}
            whole = template.render([*record.messages[:-1], answer], record.tools)
            text, contents, (start, end) = whole.text, whole.spans, whole.spans[-1]
        else:
            start = len(begin) + len(continuation.context)
            text = begin + continuation.context + continuation.text
            end = len(text)
            contents = ((len(begin), end),)
        # Cut here, so that no token contains text after the continuation.
        spans.append(shown.span(text[:end], contents, start, end))
    return spans


def make_examples(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, template: Template) -> list[Example]:
    """Tokenise all records, see :func:`make_example`."""
    texts = ShownTexts(tokenizer)
    return [make_example(index, record, texts, template) for index, record in enumerate(records)]
