"""Registry of tasks: built-in and custom ones, and the choice of a task by the records."""

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.base.files import fingerprint
from stepjepa.base.similar_names import did_you_mean
from stepjepa.base.terminal import note
from stepjepa.base.user_code import load_class
from stepjepa.data.record import Record
from stepjepa.tasks.base import Task, TaskOptions, record_error

AUTO = "auto"


def _tasks_of_this_folder() -> dict[str, type[Task]]:
    """Return every class with a ``name`` in a file of this folder, in the order in which ``auto`` tries them."""
    files = iter_modules([str(Path(__file__).parent)])
    modules = [importlib.import_module(f"{__package__}.{file.name}") for file in files]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    tasks = [kind for kind in classes if issubclass(kind, Task) and "name" in vars(kind)]
    return {task.name: task for task in sorted(tasks, key=lambda task: (task.detection_order, task.name))}


TASKS = _tasks_of_this_folder()
# Name of a data set -> its task.
ALIASES = {"synth": "nl-rx", "turk": "nl-rx", "rotten-tomatoes": "sentiment", "yelp": "sentiment"}


def load_task(name: str) -> type[Task]:
    """Return the class of a task, of :data:`TASKS` or :data:`ALIASES`, or ``module:Class``; UserError for another."""
    task_name = name.replace("_", "-")
    task_name = ALIASES.get(task_name, task_name)
    if task_name in TASKS:
        return TASKS[task_name]
    if ":" in name:
        task = load_class("task", name, Task, "docs/tasks.md")  # type: ignore[type-abstract]  # the loaded class is concrete
        for attribute in ("name", "headline", "secondary_score"):
            if not hasattr(task, attribute):
                raise UserError(f"task: '{name}' lacks the attribute '{attribute}'; see docs/tasks.md")
        return task
    expected = f"expected {AUTO}, {', '.join(TASKS)} or module:Class"
    raise UserError(f"task: no task '{name}'; {expected}{did_you_mean(name, TASKS)}")


def is_custom(task: Task) -> bool:
    """Return whether a task is the user's own, and not one of this package."""
    return not type(task).__module__.startswith("stepjepa.")


def source_fingerprint(task: Task) -> str | None:
    """Return the SHA-256 of a custom task's source file; None for a task of this package, or without a file."""
    file = getattr(sys.modules[type(task).__module__], "__file__", None) if is_custom(task) else None
    return None if file is None else fingerprint(file)


def choose_task(name: str, records: Sequence[Record], options: TaskOptions = Task.options) -> Task:
    """Return the task of a name, or with ``auto`` the first that recognises the records.

    Args:
        name: of a task, or ``auto``.
        records: those of the test file.
        options: of tasks.

    Raises:
        UserError: ``auto`` recognises only some of the records, or an option is set that the task does not use.
    """
    kind = _recognise(records) if name == AUTO else load_task(name)
    for field in fields(TaskOptions):
        if field.name in kind.used_options or getattr(options, field.name) == field.default:
            continue
        if name == AUTO and field.name == "spider_path":
            # The published drivers pass it for every data set.
            note(f"`spider_path` does nothing with task '{kind.name}'")
        else:
            raise UserError(f"`{field.name}` does nothing with task '{kind.name}'; leave it out or name another task")
    if kind is TASKS["generic"]:
        _note_what_is_compared(records, options)
    return kind.from_options(options)


def _note_what_is_compared(records: Sequence[Record], options: TaskOptions) -> None:
    """Print a note if only texts are compared, since the records' own task lacks a setting (Spider's databases)."""
    task = next((kind for kind in TASKS.values() if all(map(kind.recognises, records))), TASKS["generic"])
    try:
        task.from_options(options)
    except UserError:
        note(f"the records are of task '{task.name}', which judges by '{task.headline}'; 'generic' compares only texts")


def _recognise(records: Sequence[Record]) -> type[Task]:
    """Return the task that recognises all records; raise ``UserError`` if one recognises only some of them."""
    for name, kind in TASKS.items():
        unrecognised = [record for record in records if not kind.recognises(record)]
        if not unrecognised:
            break
        if len(unrecognised) < len(records):
            fault = f"{len(records) - len(unrecognised)} of {len(records)} records look like '{name}', but not this one"
            remedy = f"pass `task {name}` or `task generic`"
            raise record_error(unrecognised[0], f"task '{AUTO}' can't decide: {fault}; {remedy}")
    return kind


class ChosenRecords(NamedTuple):
    """The records that a task evaluates, and the others."""

    evaluated: dict[int, Record]  # by their index
    left_out: dict[str, int]  # reason -> number of records


def choose_records(task: Task, records: Sequence[Record]) -> ChosenRecords:
    """Choose the records that a task evaluates.

    Raises:
        UserError: no record is left, or one has no truth that the task can use.
    """
    evaluated: dict[int, Record] = {}
    left_out: Counter[str] = Counter()
    for index, record in enumerate(records):
        is_judged = task.judges_calls or record.answer.strip()
        reason = task.left_out(record) if is_judged else "answer without text (a tool call)"
        if reason is None:
            # A record without a usable truth must not stop a run after an hour of generating.
            task.truth(record)
            evaluated[index] = record
        else:
            left_out[reason] += 1
    if not evaluated:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in left_out.most_common())
        raise UserError(f"no record is left ({reasons}); name another `test_file` or `task`", path=records[0].path)
    return ChosenRecords(evaluated, dict(left_out))
