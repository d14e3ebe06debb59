"""Answer and score records batch by batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepjepa.data.records import Record
from stepjepa.evaluation.judging import Question, judge
from stepjepa.evaluation.prompts import Example, ShownTexts, Template, continuation_spans, make_example
from stepjepa.tasks.base import Likelihood, Task, record_error

if TYPE_CHECKING:
    from stepjepa.evaluation.generation import Generator


class Batcher:
    """Let a model answer records, and score the answers.

    Args:
        task: scores the answers.
        records: the records by index.
        engine: generates answers and computes likelihoods.
        tokenizer: the tokenizer of the engine's model.
        template: renders the records.
        batch_size: number of rows in a forward pass for likelihoods.
        headline: the score that decides what is an error; by default that of the task.

    Attributes:
        examples: the tokenised records, longest prompts first, so that the first batch needs the most memory.

    Raises:
        UserError: a record can't be rendered, or has more tokens than the model has positions.
    """

    def __init__(
        self,
        task: Task,
        records: Mapping[int, Record],
        engine: Generator,
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
        """The scored lines of a batch.

        Args:
            batch: some of :attr:`examples`.
            number: the number of the batch, which seeds sampling.

        Returns:
            The lines of ``judging.judge`` with ``gold_loss``, the LM loss per token of the right answer, and
            ``gold_tokens``.

        Raises:
            UserError: the loss is not finite.
        """
        # Computed first: sampling from logits that overflow fails without naming the record.
        gold = self._engine.log_probabilities([example.gold for example in batch])
        records = [self._records[example.index] for example in batch]
        for record, value in zip(records, gold, strict=True):
            if not math.isfinite(value):
                message = f"the model's loss on this record is {-value}; its numbers overflow: try --dtype float32"
                raise record_error(record, message)
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
        """Check that the prompt fits into the model's positions with a new answer and with each given one."""
        positions, new = self._engine.positions, self._engine.max_new_tokens
        if positions is None:
            return
        record, length = self._records[example.index], len(example.prompt_ids)
        spans = continuation_spans(record, self._task.continuations(record), self._texts, self._template)
        longest = max(len(span.ids) for span in [example.gold, *spans])
        if length + new > positions:
            raise record_error(
                record,
                f"the prompt's {length} tokens and {new} new ones are more than the model's {positions} positions; "
                "lower --max_new_tokens or remove the record",
            )
        if longest > positions:
            message = f"prompt and answer have {longest} tokens, more than the model's {positions} positions; remove it"
            raise record_error(record, message)
