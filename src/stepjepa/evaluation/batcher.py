"""From records to scored lines, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.evaluation.judging import Question, judge
from stepjepa.evaluation.prompts import Example, ShownTexts, Span, Template, continuation_spans, make_examples
from stepjepa.tasks.base import Continuation, Likelihood, Task

if TYPE_CHECKING:
    from stepjepa.evaluation.engines import Engine


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
        self.examples = [
            replace(example, index=index)
            for index, example in zip(records, make_examples(list(records.values()), tokenizer, template), strict=True)
        ]
        for example in self.examples:
            record = records[example.index]
            # Made again when they are weighed: those of all records together would fill the memory.
            rows = [example.gold, *self._spans(record, task.continuations(record))]
            engine.check_length(example, max(len(span.ids) for span in rows), record)
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
        for example, value in zip(batch, gold, strict=True):
            if not math.isfinite(value):
                record = self._records[example.index]
                raise UserError(
                    f"the model's loss on this record is {-value}; its numbers overflow: try --dtype float32",
                    path=record.path,
                    line=record.line,
                )
        answers = self._engine.answer([example.prompt_ids for example in batch], number)
        records = [self._records[example.index] for example in batch]
        questions = [
            Question(example.index, record, example.prompt, self._likelihoods(record))
            for example, record in zip(batch, records, strict=True)
        ]
        lines = judge(self._task, questions, answers, self._headline)
        for line, example, value in zip(lines, batch, gold, strict=True):
            line |= {"gold_loss": -value / example.gold.tokens, "gold_tokens": example.gold.tokens}
        return lines

    def _spans(self, record: Record, continuations: Sequence[Continuation]) -> list[Span]:
        return continuation_spans(record, continuations, self._texts, self._template) if continuations else []

    def _likelihoods(self, record: Record) -> dict[str, Likelihood] | None:
        continuations = self._task.continuations(record)
        spans = self._spans(record, continuations)
        if not spans:
            return None
        values: list[float] = []
        for start in range(0, len(spans), self._batch_size):
            values += self._engine.log_probabilities(spans[start : start + self._batch_size])
        return {
            continuation.label: Likelihood(value, span.tokens)
            for continuation, value, span in zip(continuations, values, spans, strict=True)
        }
