"""What a model is shown: the prompt of its training, the right answer behind it, and continuations to be weighed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.tokenisation import Tokens
from stepjepa.run_folder import trained_objective
from stepjepa.tasks.base import Continuation
from stepjepa.text.frames import Rendered
from stepjepa.text.plain_template import PlainTemplate
from stepjepa.text.template import ChatTemplate, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Records tokenised at a time: where each token stands in the text takes ten times the memory of the tokens.
_CHUNK = 1024


class Template(Protocol):
    """What evaluation needs of a chat template, or of the form without a chat."""

    @property
    def end_of_turn_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""
        ...

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A whole chat."""
        ...

    def prompt(self, messages: Sequence[Message]) -> str:
        """What precedes the answer."""
        ...


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
    """A row of tokens of which the end is weighed.

    Attributes:
        ids: all tokens.
        start: the first one whose probability counts, 1 or more.
    """

    ids: list[int]
    start: int

    @property
    def tokens(self) -> int:
        """How many tokens are weighed."""
        return len(self.ids) - self.start


@dataclass(frozen=True, slots=True)
class Example:
    """A record as tokens.

    Attributes:
        index: position in the test file, counted from 0.
        prompt: the text that the model is shown.
        prompt_ids: its tokens.
        gold: prompt, right answer and end of turn; the answer and what follows is weighed.
    """

    index: int
    prompt: str
    prompt_ids: list[int]
    gold: Span


def make_examples(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, template: Template) -> list[Example]:
    """Render and tokenise records as in training.

    Raises:
        UserError: the template can't render one of them.
    """
    parts = (records[start : start + _CHUNK] for start in range(0, len(records), _CHUNK))
    found = itertools.chain.from_iterable(_tokenize_records(part, tokenizer, template) for part in parts)
    return [Example(index, *each) for index, each in enumerate(found)]


def _tokenize_records(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, template: Template
) -> Iterator[tuple[str, list[int], Span]]:
    prompts, rendered = [], []
    for record in records:
        try:
            prompts.append(template.prompt(record.messages[:-1]))
            rendered.append(template.render(record.messages))
        except UserError as error:
            raise UserError(str(error), path=record.path, line=record.line) from None
    prompt_ids = _tokenize(tokenizer, prompts)["input_ids"]
    gold = _spans(
        tokenizer,
        [whole.text for whole in rendered],
        [whole.spans[-1][0] for whole in rendered],
        [whole.turn_ends[-1] for whole in rendered],
    )
    return zip(prompts, prompt_ids, gold, strict=True)


def continuation_spans(
    record: Record,
    continuations: Sequence[Continuation],
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
) -> list[Span]:
    """Rows in which the continuations of a record are weighed.

    Args:
        record: its prompt is the context of continuations that have none of their own.
        continuations: at least one.
        tokenizer: of the model.
        template: as for prompts.
    """
    # A text of its own begins as the tokenizer begins texts; a prompt has its special tokens already.
    begin = tokenizer.bos_token or ""
    texts, starts, ends = [], [], []
    for continuation in continuations:
        if continuation.context is None:
            answer = {"role": "assistant", "content": continuation.text}
            whole = template.render([*record.messages[:-1], answer])
            text, (start, end) = whole.text, whole.spans[-1]
        else:
            start = len(begin) + len(continuation.context)
            text = begin + continuation.context + continuation.text
            end = len(text)
        # Without what follows, so that the last token is that of the continuation alone.
        texts.append(text[:end])
        starts.append(start)
        ends.append(end)
    return _spans(tokenizer, texts, starts, ends)


def _spans(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], starts: Sequence[int], ends: Sequence[int]
) -> list[Span]:
    """Each text up to the token that begins at its end or later, weighed from the token that holds its start."""
    found = _tokenize(tokenizer, texts, return_offsets_mapping=True)
    spans = []
    for ids, pairs, start, end in zip(found["input_ids"], found["offset_mapping"], starts, ends, strict=True):
        offsets = np.asarray(pairs, np.int32).reshape(-1, 2)
        tokens = Tokens(np.asarray(ids, np.int32), offsets[:, 0], offsets[:, 1])
        # Nothing predicts the first token of a row.
        spans.append(Span(list(ids[: tokens.first_from(end)]), max(1, tokens.first_overlapping(start))))
    return spans


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any) -> Mapping[str, Any]:
    # The special tokens are written out. The tokenizer's warning about long texts is left to the model check.
    found: Mapping[str, Any] = tokenizer(list(texts), add_special_tokens=False, verbose=False, **options)
    return found


def check_positions(positions: int | None, example: Example, longest: int, new_tokens: int, record: Record) -> None:
    """Refuse what is longer than a model's positions.

    Args:
        positions: how many the model has; None for no limit.
        example: what is asked.
        longest: tokens of the longest text that is weighed for it.
        new_tokens: how many may be generated.
        record: for the message.

    Raises:
        UserError: a prompt with its answer, generated or given, is too long.
    """
    if positions is None:
        return
    length = len(example.prompt_ids)
    if length + new_tokens > positions:
        raise UserError(
            f"the prompt's {length} tokens and {new_tokens} new ones are more than the model's {positions} positions; "
            "lower --max_new_tokens or remove the record",
            path=record.path,
            line=record.line,
        )
    if longest > positions:
        raise UserError(
            f"prompt and answer have {longest} tokens, more than the model's {positions} positions; remove the record",
            path=record.path,
            line=record.line,
        )
