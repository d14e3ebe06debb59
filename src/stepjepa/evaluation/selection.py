"""Select the records of a test file that its task can score."""

from __future__ import annotations

from collections.abc import Sequence

from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.evaluation.output import summarise
from stepjepa.evaluation.verdicts import details_checked
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.reference import with_published_rules
from stepjepa.tasks.registry import choose_records, choose_task


class Selection:
    """The task of a test file and the records that it can score.

    Args:
        records: the records of the test file.
        task: name of the task, see ``registry.choose_task``.
        options: settings of the task.
        scoring: ``own`` rules, or ``reference`` for those of the published evaluation.
        startswith: judge an answer by its beginning.

    Attributes:
        task: the task.
        headline: the score that decides whether an answer is an error.
        records: the records that the task can score, by position.
        left_out: number of the other records, by reason.
        options: the task options that affect the scores.

    Raises:
        UserError: the task can score none of the records.
    """

    def __init__(
        self, records: Sequence[Record], *, task: str, options: TaskOptions, scoring: str, startswith: bool
    ) -> None:
        chosen = choose_task(task, records, options)
        self.task = with_published_rules(chosen) if scoring == "reference" else chosen
        self.headline = self.task.beginning if startswith else self.task.headline
        self.records, self.left_out = choose_records(self.task, records)
        self.options = {name: getattr(options, name) for name in chosen.used_options if name != "workers"}

    def summarise(self, lines: Sequence[JsonObject]) -> JsonObject:
        """Return the part of a summary that is computed from the lines."""
        task = {"left_out": self.left_out, "task": self.task.name, "lenient": self.task.secondary_score}
        return {**task, **summarise(lines, self.headline), "details": details_checked(self.task, lines)}
