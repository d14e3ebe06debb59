"""What a model is shown: the prompt of its training, the right answer behind it, and continuations to be weighed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from stepjepa.batch.tokenize import Tokens
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.special import Spans, SpecialTokens
from stepjepa.chat.template import ChatTemplate, Message, Rendered
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.run_folder import trained_objective
from stepjepa.tasks.base import Continuation

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

    def render_prompt(self, messages: Sequence[Message]) -> Rendered:
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
    texts = ShownTexts(tokenizer)
    found = itertools.chain.from_iterable(_tokenize_records(part, texts, template) for part in parts)
    return [Example(index, *each) for index, each in enumerate(found)]


def _tokenize_records(
    records: Sequence[Record], texts: ShownTexts, template: Template
) -> Iterator[tuple[str, list[int], Span]]:
    prompts, rendered = [], []
    for record in records:
        try:
            prompts.append(template.render_prompt(record.messages[:-1]))
            rendered.append(template.render(record.messages))
        except UserError as error:
            raise UserError(str(error), path=record.path, line=record.line) from None
    shown = [prompt.text for prompt in prompts]
    prompt_ids, _ = texts.tokenize(shown, [prompt.spans for prompt in prompts])
    gold = texts.spans(
        [whole.text for whole in rendered],
        [whole.spans for whole in rendered],
        [whole.spans[-1][0] for whole in rendered],
        [whole.turn_ends[-1] for whole in rendered],
    )
    return zip(shown, prompt_ids, gold, strict=True)


def continuation_spans(
    record: Record,
    continuations: Sequence[Continuation],
    tokenizer: PreTrainedTokenizerBase | ShownTexts,
    template: Template,
) -> list[Span]:
    """Rows in which the continuations of a record are weighed.

    Args:
        record: its prompt is the context of continuations that have none of their own.
        continuations: at least one.
        tokenizer: of the model, or what is kept of it for many calls.
        template: as for prompts.
    """
    shown = tokenizer if isinstance(tokenizer, ShownTexts) else ShownTexts(tokenizer)
    # A text of its own begins as the tokenizer begins texts; a prompt has its special tokens already.
    begin = shown.tokenizer.bos_token or ""
    texts: list[str] = []
    contents: list[Spans] = []
    starts, ends = [], []
    for continuation in continuations:
        if continuation.context is None:
            answer = {"role": "assistant", "content": continuation.text}
            whole = template.render([*record.messages[:-1], answer])
            text, (start, end) = whole.text, whole.spans[-1]
            contents.append(whole.spans)
        else:
            start = len(begin) + len(continuation.context)
            text = begin + continuation.context + continuation.text
            end = len(text)
            contents.append([(len(begin), end)])
        # Without what follows, so that the last token is that of the continuation alone.
        texts.append(text[:end])
        starts.append(start)
        ends.append(end)
    return shown.spans(texts, contents, starts, ends)


class ShownTexts:
    """Tokenises texts that hold their special tokens already; in what others wrote there are none.

    Args:
        tokenizer: fast; it is not changed.

    Attributes:
        tokenizer: as given.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = SpecialTokens(tokenizer)

    def spans(
        self, texts: Sequence[str], contents: Sequence[Spans], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Span]:
        """Each text up to the token that begins at its end or later, weighed from the token that holds its start."""
        spans = []
        for ids, pairs, start, end in zip(*self.tokenize(texts, contents), starts, ends, strict=True):
            offsets = np.asarray(pairs, np.int32).reshape(-1, 2)
            tokens = Tokens(np.asarray(ids, np.int32), offsets[:, 0], offsets[:, 1])
            # Nothing predicts the first token of a row.
            spans.append(Span(list(ids[: tokens.first_from(end)]), max(1, tokens.first_overlapping(start))))
        return spans

    def tokenize(self, texts: Sequence[str], contents: Sequence[Spans]) -> tuple[list[list[int]], list[Any]]:
        """The ids of the tokens of each text, and for each token its first and one past its last character."""
        # The special tokens are written out. The tokenizer's warning about long texts is left to the model check.
        found = self.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = list(found["input_ids"]), list(found["offset_mapping"])
        both = enumerate(zip(texts, contents, strict=True))
        spelling = [index for index, each in both if self._special.spelt(*each)]
        if spelling:
            apart = self._special.encode([texts[i] for i in spelling], [contents[i] for i in spelling])
            for index, *each in zip(spelling, *apart, strict=True):
                ids[index], offsets[index] = each
        return ids, offsets


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
