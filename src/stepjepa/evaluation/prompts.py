"""What a model is shown: the prompt of its training, the right answer behind it, and continuations to be weighed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepjepa.batch.tokenize import Tokens
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.special import Spans, SpecialTokens
from stepjepa.chat.template import ChatTemplate
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.run_folder import trained_objective
from stepjepa.tasks.base import Continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Template = ChatTemplate | PlainTemplate


def make_template(tokenizer: Any, *, plain: bool) -> Template:
    """The chat template of a tokenizer, or the form without a chat.

    Raises:
        UserError: the tokenizer does not serve for it.
    """
    return PlainTemplate(tokenizer) if plain else ChatTemplate(tokenizer)


def trained_plain(model_path: str | os.PathLike[str]) -> bool:
    """Whether the run that made a model says that it was trained without a chat format."""
    return bool((trained_objective(model_path) or {}).get("plain", False))


class Span(NamedTuple):
    """A row of tokens of which the end is weighed."""

    ids: list[int]
    start: int
    """The first token whose probability counts, 1 or more."""

    @property
    def tokens(self) -> int:
        """How many tokens are weighed."""
        return len(self.ids) - self.start


@dataclass(frozen=True, slots=True)
class Example:
    """A record as tokens."""

    index: int
    """Position in the test file, counted from 0."""
    prompt: str
    """The text that the model is shown."""
    prompt_ids: list[int]
    gold: Span
    """Prompt, right answer and end of turn; the answer and what follows is weighed."""


class ShownTexts:
    """Tokenises texts that hold their special tokens already; in what others wrote there are none.

    Args:
        tokenizer: fast; it is not changed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = SpecialTokens(tokenizer)

    def tokenize(self, text: str, contents: Spans) -> tuple[list[int], Sequence[tuple[int, int]]]:
        """The ids of the tokens of a text, and for each token its first and one past its last character."""
        if self._special.spelt(text, contents):
            ids, offsets = self._special.encode([text], [contents])
            return list(ids[0]), offsets[0]
        # The special tokens are written out. The tokenizer's warning about long texts is left to the model check.
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return found["input_ids"], found["offset_mapping"]

    def span(self, text: str, contents: Spans, start: int, end: int) -> Span:
        """A text up to the token that begins at its end or later, weighed from the token that holds its start."""
        ids, pairs = self.tokenize(text, contents)
        offsets = np.asarray(pairs, np.int32).reshape(-1, 2)
        tokens = Tokens(np.asarray(ids, np.int32), offsets[:, 0], offsets[:, 1])
        # Nothing predicts the first token of a row.
        return Span(ids[: tokens.first_from(end)], max(1, tokens.first_overlapping(start)))


def make_example(index: int, record: Record, texts: ShownTexts, template: Template) -> Example:
    """Render and tokenise a record as in training.

    Raises:
        UserError: the template can't render it.
    """
    try:
        if not record.answer.strip():
            raise UserError("the last message is a tool call, which has no text to be compared; leave the record out")
        prompt = template.render_prompt(record.messages[:-1], record.tools)
        whole = template.render(record.messages, record.tools)
    except UserError as error:
        raise UserError(str(error), path=record.path, line=record.line) from None
    prompt_ids, _ = texts.tokenize(prompt.text, prompt.spans)
    gold = texts.span(whole.text, whole.spans, whole.spans[-1][0], whole.turn_ends[-1])
    return Example(index, prompt.text, prompt_ids, gold)


def continuation_spans(
    record: Record, continuations: Sequence[Continuation], shown: ShownTexts, template: Template
) -> list[Span]:
    """Rows in which the continuations of a record are weighed, behind its prompt or a context of their own."""
    # A text of its own begins as the tokenizer begins texts; a prompt has its special tokens already.
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
        # Without what follows, so that the last token is that of the continuation alone.
        spans.append(shown.span(text[:end], contents, start, end))
    return spans


def make_examples(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, template: Template) -> list[Example]:
    """All records as tokens, see :func:`make_example`."""
    texts = ShownTexts(tokenizer)
    return [make_example(index, record, texts, template) for index, record in enumerate(records)]
