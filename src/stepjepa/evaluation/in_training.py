"""Score generated answers during training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from stepjepa.data.records import Record
from stepjepa.evaluation.batcher import Batcher
from stepjepa.evaluation.generation import Generator
from stepjepa.evaluation.prompts import make_template
from stepjepa.evaluation.settings import Sampling
from stepjepa.tasks.base import Task
from stepjepa.tasks.registry import keep

COUNT = "answers"
"""The name under which :class:`AnswerScores` returns the number of records."""


def spread(records: Sequence[Record], count: int) -> list[Record]:
    """At most ``count`` records at even distances, since a file may be sorted by label."""
    count = min(count, len(records))
    return [records[at * len(records) // count] for at in range(count)]


class AnswerScores:
    """Lets a model answer held-out records greedily, and sums up the scores.

    Args:
        records: the records; those that the task leaves out are dropped.
        task: scores the answers.
        tokenizer: the tokenizer of the model.
        max_new_tokens: greatest length of an answer.
        batch_size: prompts per batch.
        plain: render the records without a chat format.

    Raises:
        UserError: a record has no truth that the task can use, or no record is left.
    """

    def __init__(
        self,
        records: Sequence[Record],
        task: Task,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        batch_size: int,
        plain: bool = False,
    ) -> None:
        self._records, _ = keep(task, records)
        self._task, self._tokenizer, self._plain = task, tokenizer, plain
        self._sampling, self._batch_size = Sampling(max_new_tokens=max_new_tokens), batch_size

    def check(self, model: Any) -> None:
        """Raise ``UserError`` before training if a record with its answer is longer than the model's positions."""
        self._batcher(model)

    def _batcher(self, model: Any) -> Batcher:
        template = make_template(self._tokenizer, plain=self._plain)
        engine = Generator(model, self._tokenizer, template.end_of_turn_ids, self._sampling)
        return Batcher(self._task, self._records, engine, self._tokenizer, template, batch_size=self._batch_size)

    def __call__(self, model: Any, rank: int, world: int) -> dict[str, float]:
        """The sums of the scores over the records of one process.

        Args:
            model: the model in evaluation mode.
            rank: number of this process.
            world: number of processes.

        Returns:
            The sum of each of the task's scores, of ``stopped`` and of :data:`COUNT`; the same names in every process.
        """
        batcher = self._batcher(model)
        # A process without records scores the first one to learn the names, and counts it as 0.
        share = batcher.examples[rank::world]
        sums: Counter[str] = Counter()
        for number, start in enumerate(range(0, max(len(share), 1), self._batch_size)):
            batch = share[start : start + self._batch_size] or batcher.examples[:1]
            for line in batcher.lines(batch, number):
                found = {**line["scores"], "stopped": line["stopped"], COUNT: 1}
                sums.update({name: float(value) if share else 0.0 for name, value in found.items()})
        return dict(sums)

    def close(self) -> None:
        """End the processes of the task."""
        self._task.close()


def answer_means(score: Callable[[Any, int, int], dict[str, float]], trainer: Any) -> dict[str, float]:
    """The mean of each score over all processes of a ``JepaTrainer``.

    Args:
        score: returns the sums of one process, such as :class:`AnswerScores`.
        trainer: the trainer.
    """
    sums = score(trainer.model, trainer.accelerator.process_index, trainer.accelerator.num_processes)
    totals = dict(zip(sums, trainer.total(list(sums.values())), strict=True))
    count = totals.pop(COUNT)
    return {f"answer_{name}": total / count for name, total in totals.items()}
