"""Answer records with a model and score the answers, one line per record; also during training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from stepjepa.base.errors import naming_batch_size
from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.evaluation.judging import LineBatches, Question, judge
from stepjepa.evaluation.prompts import Example, make_examples
from stepjepa.models.sampling import Sampling, Span
from stepjepa.tasks.base import Likelihood, Response, Task, record_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stepjepa.models.generation import Generator

COUNT = "answers"  # the name under which AnswerScores returns the number of records


@dataclass
class Batcher:
    """The built-in engine: generates answers with a transformers model, batch by batch, and scores them.

    Attributes:
        examples: the tokenised records, longest prompts first, so that the first batch needs the most memory.

    Raises:
        UserError: a record can't be rendered, or has more tokens than the model has positions.
    """

    task: Task
    records: Mapping[int, Record]
    generator: Generator
    _: KW_ONLY
    batch_size: int
    headline: str | None = None  # the score that decides what is an error; by default that of the task

    def __post_init__(self) -> None:
        tokenizer, template = self.generator.tokenizer, self.generator.template
        self.examples = make_examples(self.records.items(), tokenizer, template, self.task.continuations)
        positions, new = self.generator.positions or math.inf, self.generator.sampling.max_new_tokens
        for example in self.examples:
            spans = example.gold, *example.continuations.values()
            longest = max(len(example.prompt_ids) + new, *(len(span.ids) for span in spans))
            if longest > positions:
                fault = f"prompt and answer (of {new} new tokens at most) have {longest} tokens, the model {positions}"
                remedy = "positions; lower `max_new_tokens` or remove the record"
                raise record_error(self.records[example.index], f"{fault} {remedy}")
        self.examples.sort(key=lambda example: (-len(example.prompt_ids), example.index))

    def answer_missing(self, done: Container[int]) -> LineBatches:
        """Yield the missing lines of each batch; see ``judging.Engine``."""
        for number, start in enumerate(range(0, len(self.examples), self.batch_size)):
            # A batch with missing lines is run as a whole, since its padding affects the last bits of the results.
            batch = self.examples[start : start + self.batch_size]
            missing = {example.index for example in batch if example.index not in done}
            if missing:
                with naming_batch_size(self.batch_size):
                    lines = self.lines(batch, number)
                yield [line for line in lines if line["index"] in missing]

    def lines(self, batch: Sequence[Example], number: int) -> list[JsonObject]:
        """Answer and score a batch of ``examples``; UserError if a loss is not finite.

        Args:
            batch: the examples.
            number: of the batch; it seeds sampling.

        Returns:
            the lines of :func:`judge` with ``gold_loss``, the LM loss per token of the right answer, and
            ``gold_tokens``, the number of its tokens.
        """
        # Computed first: sampling from logits that overflow fails without naming the record.
        gold = self._log_probabilities([example.gold for example in batch])
        for example, value in zip(batch, gold, strict=True):
            if not math.isfinite(value):
                message = f"the model's loss on this record is {-value}; its numbers overflow: try `dtype float32`"
                raise record_error(self.records[example.index], message)
        answers = self.generator.answer([example.prompt_ids for example in batch], number)
        questions = [
            Question(prompted.index, self.records[prompted.index], prompted.prompt, self._likelihoods(prompted))
            for prompted in batch
        ]
        lines = judge(self.task, questions, answers, self.headline)
        for line, example, value in zip(lines, batch, gold, strict=True):
            line |= {"gold_loss": -value / example.gold.tokens, "gold_tokens": example.gold.tokens}
        return lines

    def _likelihoods(self, example: Example) -> dict[str, Likelihood] | None:
        values = self._log_probabilities(list(example.continuations.values()))
        scored = zip(example.continuations.items(), values, strict=True)
        return {label: Likelihood(value, span.tokens) for (label, span), value in scored} or None

    def _log_probabilities(self, spans: Sequence[Span]) -> list[float]:
        size = self.batch_size
        parts = [spans[start : start + size] for start in range(0, len(spans), size)]
        return [value for part in parts for value in self.generator.log_probabilities(part)]


def spread(records: Sequence[Record], count: int) -> list[Record]:
    """Return at most ``count`` records at even distances, since a file may be sorted by label."""
    count = min(count, len(records))
    return [records[at * len(records) // count] for at in range(count)]


@dataclass
class AnswerScores:
    """Scores of greedy answers to held-out records during training; the task must be able to score all of them."""

    records: Sequence[Record]
    task: Task
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    max_new_tokens: int
    batch_size: int
    plain: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the scores, which are the same for all answers."""
        return [*self.task.score(self.records[0], Response("")).scores, "stopped"]

    def batcher(self, model: PreTrainedModel) -> Batcher:
        """Make the engine that answers; ``UserError`` if a record with its answer is longer than the model's positions.

        A caller may discard it, to see such an error before training.
        """
        from stepjepa.models.generation import Generator

        generator = Generator(model, self.tokenizer, Sampling(self.max_new_tokens), plain=self.plain)
        return Batcher(self.task, dict(enumerate(self.records)), generator, batch_size=self.batch_size)

    def __call__(self, model: PreTrainedModel, rank: int, world: int) -> dict[str, float]:
        """Return the sums of the scores and of ``stopped`` over this process's share, and its size as :data:`COUNT`.

        The share of process ``rank`` is every ``world``-th record; the names are the same in every process.
        """
        batcher = self.batcher(model)
        # A process without records scores the first one to learn the names, and counts it as 0.
        share = batcher.examples[rank::world]
        sums: Counter[str] = Counter()
        for number, start in enumerate(range(0, max(len(share), 1), self.batch_size)):
            batch = share[start : start + self.batch_size] or batcher.examples[:1]
            for line in batcher.lines(batch, number):
                values = {**line["scores"], "stopped": line["stopped"], COUNT: 1}
                sums.update({name: float(value) if share else 0.0 for name, value in values.items()})
        return dict(sums)

    def close(self) -> None:
        """End the processes of the task."""
        self.task.close()
