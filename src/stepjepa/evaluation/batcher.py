"""From records to scored lines, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.evaluation.judging import Answer, Question, judge
from stepjepa.evaluation.prompts import Example, ShownTexts, Span, Template, continuation_spans, make_example
from stepjepa.tasks.base import Likelihood, Task


class Engine(Protocol):
    """One model that answers and weighs."""

    positions: int | None
    """How many tokens the model has positions for; None for no limit."""
    max_new_tokens: int
    """Where answers are cut off."""

    def answer(self, prompts: Sequence[Sequence[int]], batch_number: int = 0) -> list[list[Answer]]:
        """For each prompt its samples; ``batch_number`` seeds draws."""
        ...

    def log_probabilities(self, spans: Sequence[Span]) -> list[float]:
        """The natural logarithm of the probability of each span's weighed tokens, given what stands before them."""
        ...


class Batcher:
    """Has records answered, weighed and judged.

    Args:
        task: knows what is right.
        records: what is asked, by index.
        engine: answers and weighs.
        tokenizer: of the engine's model.
        template: how records are shown.
        batch_size: rows that are weighed at a time.
        headline: the score that decides what is an error; the task's own by default.

    Attributes:
        examples: the records as tokens, the longest prompts first, so that memory problems show at once.

    Raises:
        UserError: a record can't be rendered, or is longer than the model's positions.
    """

    def __init__(
        self,
        task: Task,
        records: Mapping[int, Record],
        engine: Engine,
        tokenizer: Any,
        template: Template,
        *,
        batch_size: int,
        headline: str | None = None,
    ) -> None:
        self._task, self._records, self._engine = task, records, engine
        self._texts, self._template = ShownTexts(tokenizer), template
        self._batch_size, self._headline = batch_size, headline
        self.examples = [make_example(index, record, self._texts, template) for index, record in records.items()]
        for example in self.examples:
            self._check_length(example)
        self.examples.sort(key=lambda example: (-len(example.prompt_ids), example.index))

    def lines(self, batch: Sequence[Example], number: int) -> list[dict[str, Any]]:
        """What ``judging.judge`` makes of a batch, with ``gold_loss``, the LM loss per token, and ``gold_tokens``.

        Args:
            batch: some of :attr:`examples`.
            number: seeds draws.

        Raises:
            UserError: the model's numbers overflow.
        """
        # First, since of numbers that overflow nothing can be drawn.
        gold = self._engine.log_probabilities([example.gold for example in batch])
        records = [self._records[example.index] for example in batch]
        for record, value in zip(records, gold, strict=True):
            if not math.isfinite(value):
                raise UserError(
                    f"the model's loss on this record is {-value}; its numbers overflow: try --dtype float32",
                    path=record.path,
                    line=record.line,
                )
        answers = self._engine.answer([example.prompt_ids for example in batch], number)
        questions = [
            Question(example.index, record, example.prompt, self._likelihoods(record))
            for example, record in zip(batch, records, strict=True)
        ]
        lines = judge(self._task, questions, answers, self._headline)
        for line, example, value in zip(lines, batch, gold, strict=True):
            line |= {"gold_loss": -value / example.gold.tokens, "gold_tokens": example.gold.tokens}
        return lines

    def _likelihoods(self, record: Record) -> dict[str, Likelihood] | None:
        continuations = self._task.continuations(record)
        spans = continuation_spans(record, continuations, self._texts, self._template)
        values: list[float] = []
        for start in range(0, len(spans), self._batch_size):
            values += self._engine.log_probabilities(spans[start : start + self._batch_size])
        found = zip(continuations, values, spans, strict=True)
        return {each.label: Likelihood(value, span.tokens) for each, value, span in found} or None

    def _check_length(self, example: Example) -> None:
        """Refuse a prompt that is too long for the model with its answer, generated or given."""
        positions, new = self._engine.positions, self._engine.max_new_tokens
        if positions is None:
            return
        record, length = self._records[example.index], len(example.prompt_ids)
        weighed = continuation_spans(record, self._task.continuations(record), self._texts, self._template)
        longest = max(len(span.ids) for span in [example.gold, *weighed])
        message = None
        if length + new > positions:
            message = (
                f"the prompt's {length} tokens and {new} new ones are more than the model's {positions} positions; "
                "lower --max_new_tokens or remove the record"
            )
        elif longest > positions:
            message = f"prompt and answer have {longest} tokens, more than the model's {positions} positions; remove it"
        if message:
            raise UserError(message, path=record.path, line=record.line)
