"""What a model is asked in an evaluation: prompts, right answers and continuations as tokens; how it is to answer."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.chat.template import ChatTemplate, PlainTemplate
from stepjepa.chat.tokens import Spans, TextTokenizer
from stepjepa.config.option import FROM_ONE, FROM_ZERO, PART, check_values, option, refuse_without_effect
from stepjepa.data.records import Record
from stepjepa.tasks.base import Continuation, record_error

Template = ChatTemplate | PlainTemplate

LONGEST = 512  # length of an answer in the published evaluation with --max_new_tokens -1


def _length(text: str) -> int:
    """Parse ``--max_new_tokens``; -1 has the effect that it has in the published evaluation."""
    if text != "-1":
        return int(text)
    print(f"note: --max_new_tokens -1 is --max_new_tokens {LONGEST}", file=sys.stderr)
    return LONGEST


@dataclass(frozen=True)
class Sampling:
    """Settings of decoding; UserError if one is out of range or has no effect on greedy answers."""

    max_new_tokens: int = option(256, "cut answers off there", allowed=FROM_ONE, parse=_length)
    temperature: float = option(0.0, "0 is greedy", metavar="T", allowed=FROM_ZERO)
    top_p: float = option(1.0, "of sampling", metavar="P", allowed=PART, only_with="temperature")
    top_k: int = option(0, "of sampling; 0 for all tokens", metavar="K", allowed=FROM_ZERO, only_with="temperature")
    seed: int = option(42, "of sampling", allowed=FROM_ZERO)
    num_samples: int = option(1, "answers a prompt: pass@N, majority", allowed=FROM_ONE, only_with="temperature")

    def __post_init__(self) -> None:
        check_values(self)
        refuse_without_effect(vars(self), Sampling)


class Answer(NamedTuple):
    """A generated answer."""

    text: str  # before the first stop token, without special tokens
    stopped: bool | None = None  # whether the model ended its turn by itself; None if unknown
    new_tokens: int | None = None  # number of generated tokens, including the stop token; None if unknown


class Span(NamedTuple):
    """A row of tokens whose tokens from ``start`` (1 or more) on are scored by their likelihood."""

    ids: list[int]
    start: int

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return len(self.ids) - self.start


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
    tokenizer: Any,
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
