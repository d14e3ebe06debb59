"""Scores of generated answers while a model trains."""

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


def spread(records: Sequence[Record], count: int) -> list[Record]:
    """So many records from all over a file, which may be sorted by label; all if there are no more."""
    count = min(count, len(records))
    return [records[at * len(records) // count] for at in range(count)]


class AnswerScores:
    """Lets a model answer some held-out records greedily and adds up the scores.

    Args:
        records: what is asked.
        task: knows what is right.
        tokenizer: of the model.
        max_new_tokens: where an answer is cut off.
        batch_size: prompts per batch.
        plain: asks without a chat format.

    Raises:
        UserError: a record has no truth that the task can use.
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
        """Refuse records that the model has no positions for, before it is trained.

        Raises:
            UserError: a prompt with its answer, generated or given, is too long.
        """
        self._batcher(model)

    def _batcher(self, model: Any) -> Batcher:
        template = make_template(self._tokenizer, plain=self._plain)
        engine = Generator(model, self._tokenizer, template.end_of_turn_ids, self._sampling)
        return Batcher(self._task, self._records, engine, self._tokenizer, template, batch_size=self._batch_size)

    def __call__(self, model: Any, rank: int, world: int) -> dict[str, float]:
        """The sums of every score over one process's share of the records.

        Args:
            model: in evaluation mode.
            rank: of this process.
            world: number of processes.

        Returns:
            A sum for each of the task's scores and ``stopped``, and :data:`COUNT`. The same names in every process.
        """
        batcher = self._batcher(model)
        # Processes without an example of their own repeat one, to know the names; it does not count.
        share = batcher.examples[rank::world]
        sums: Counter[str] = Counter()
        for number, start in enumerate(range(0, max(len(share), 1), self._batch_size)):
            batch = share[start : start + self._batch_size] or batcher.examples[:1]
            for line in batcher.lines(batch, number):
                found = {**line["scores"], "stopped": line["stopped"], COUNT: 1}
                sums.update({name: float(value) if share else 0.0 for name, value in found.items()})
        return dict(sums)

    def close(self) -> None:
        """End the task's processes."""
        self._task.close()


def answer_means(score: Callable[[Any, int, int], dict[str, float]], trainer: Any) -> dict[str, float]:
    """The mean of each score over the processes of a ``JepaTrainer``; ``score`` gives the sums of one process."""
    sums = score(trainer.model, trainer.accelerator.process_index, trainer.accelerator.num_processes)
    totals = dict(zip(sums, trainer.total(list(sums.values())), strict=True))
    count = totals.pop(COUNT)
    return {f"answer_{name}": total / count for name, total in totals.items()}
