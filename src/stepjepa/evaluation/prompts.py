"""Tokenised evaluation inputs: prompt, right answer and continuations of each record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError
from stepjepa.chat.template import ChatTemplate, PlainTemplate
from stepjepa.chat.tokens import Spans, TextTokenizer
from stepjepa.data.records import Record
from stepjepa.models.sampling import Span
from stepjepa.tasks.base import Continuation, record_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Template = ChatTemplate | PlainTemplate


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenised record."""

    index: int  # position in the test file, from 0
    prompt: str
    prompt_ids: list[int]
    gold: Span  # prompt, right answer and end of turn; the last two are scored
    continuations: dict[str, Span]  # of the task, by label; each after the prompt or after a context of its own


def _span(texts: TextTokenizer, text: str, contents: Spans, start: int, end: int) -> Span:
    """The tokens of a text that begin before character ``end``, scored from the token that contains ``start``."""
    (tokens,) = texts([text], [contents])
    # The first token of a row has no prediction.
    return Span(tokens.ids[: tokens.first_from(end)].tolist(), max(1, tokens.first_overlapping(start)))


def make_examples(
    records: Iterable[tuple[int, Record]],
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    continuations: Callable[[Record], Sequence[Continuation]] = lambda record: (),
) -> list[Example]:
    """Tokenise records and the continuations of each as in training; UserError if the template can't render one."""
    texts, found = TextTokenizer(tokenizer), []
    for index, record in records:
        try:
            prompt, whole = template.render_prompt(record.messages[:-1]), template.render(record.messages)
            scored = {each.label: _continuation_span(record, each, texts, template) for each in continuations(record)}
        except UserError as error:
            raise record_error(record, str(error)) from None
        prompt_ids = texts([prompt.text], [prompt.spans])[0].ids.tolist()
        gold = _span(texts, whole.text, whole.spans, whole.spans[-1][0], whole.turn_ends[-1])
        found.append(Example(index, prompt.text, prompt_ids, gold, scored))
    return found


def _continuation_span(record: Record, continuation: Continuation, texts: TextTokenizer, template: Template) -> Span:
    if continuation.context is None:
        whole = template.render([*record.messages[:-1], {"role": "assistant", "content": continuation.text}])
        text, contents, (start, end) = whole.text, whole.spans, whole.spans[-1]
    else:
        # A rendered prompt has its special tokens; a context of its own needs the one that begins texts.
        begin = texts.tokenizer.bos_token or ""
        start = len(begin) + len(continuation.context)
        text = begin + continuation.context + continuation.text
        end, contents = len(text), ((len(begin), len(text)),)
    # Cut here, so that no token contains text after the continuation.
    return _span(texts, text[:end], contents, start, end)
