"""What a task is, and which tasks there are.

A task knows how to find the truth in a record and how to score what a model said to it. A new one is a file in this
folder with a class of this protocol, and a line in :func:`all_tasks`; its options, if it needs any, are arguments of
that class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepjepa.errors import UserError
from stepjepa.records import Record

TASK_NAMES = ("auto", "generic", "boxed")


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of one generated answer.

    Attributes:
        scores: by name; True and False, or numbers of which the mean makes sense. The names are the same for every
            record of a task.
        extracted: what was read out of the truth and of the answer, by name; None where nothing was found.
    """

    scores: dict[str, bool | float]
    extracted: dict[str, str | None] = field(default_factory=dict)


class Task(Protocol):
    """How the records of one kind are scored.

    Attributes:
        name: as given to ``--task``.
        headline: the score that counts when only one is shown.
        lenient: the score that overlooks what follows the right answer; beside the headline it shows how much of that
            is stopping at the right place.
    """

    name: str
    headline: str
    lenient: str

    def recognises(self, record: Record) -> bool:
        """Whether a record is of this task, judged by its truth; asked for ``--task auto``."""
        ...

    def truth(self, record: Record) -> str:
        """The right answer of a record.

        Raises:
            UserError: the record has none that this task can use.
        """
        ...

    def score(self, record: Record, generated: str) -> Scored:
        """Judge an answer.

        Args:
            record: the example.
            generated: the text that the model gave before it stopped.

        Raises:
            UserError: as :meth:`truth`.
        """
        ...


def all_tasks() -> dict[str, Task]:
    """Every task by name, the special ones first and ``generic``, which takes any record, last."""
    # Here, since the tasks themselves import this file, and some will need what only they use.
    from stepjepa.tasks.boxed import BoxedTask
    from stepjepa.tasks.generic import GenericTask

    tasks: tuple[Task, ...] = (BoxedTask(), GenericTask())
    return {task.name: task for task in tasks}


def choose_task(name: str, records: Sequence[Record]) -> Task:
    """The task of a name, or with ``auto`` the one that recognises the records.

    Raises:
        UserError: there is no such task; or a task recognises some of the records but not all, so that any choice
            would score the others wrongly.
    """
    tasks = all_tasks()
    if name != "auto":
        if name not in tasks:
            raise UserError(f"task: expected one of {', '.join(TASK_NAMES)}, got '{name}'")
        return tasks[name]
    for task in tasks.values():
        strangers = [record for record in records if not task.recognises(record)]
        if not strangers:
            return task
        if len(strangers) < len(records):
            raise UserError(
                f"task 'auto' can't decide: {len(records) - len(strangers)} of {len(records)} records look like "
                f"'{task.name}', but not this one; pass --task {task.name} or --task generic",
                path=strangers[0].path,
                line=strangers[0].line,
            )
    raise AssertionError("the generic task takes every record")
