"""Which tasks there are, which one a file belongs to, tasks of the user's own, and the published rules."""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from pkgutil import iter_modules

from stepjepa.base.errors import UserError
from stepjepa.base.files import fingerprint
from stepjepa.config.option import load_class
from stepjepa.data.records import Record
from stepjepa.tasks.base import WRONG, Response, Scored, Task, TaskOptions, record_error

AUTO = "auto"


def _tasks_of_this_folder() -> dict[str, type[Task]]:
    """Every class with a ``name`` in a file beside this one, in the order in which ``auto`` asks them."""
    files = iter_modules([str(Path(__file__).parent)])
    modules = [importlib.import_module(f"{__package__}.{file.name}") for file in files]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    tasks = [each for each in classes if issubclass(each, Task) and "name" in vars(each)]
    return {task.name: task for task in sorted(tasks, key=lambda task: (task.asked, task.name))}


TASKS = _tasks_of_this_folder()
# The data sets by their own names.
ALIASES = {"synth": "nl-rx", "turk": "nl-rx", "rotten-tomatoes": "sentiment", "yelp": "sentiment"}


def load_task(name: str) -> type[Task]:
    """The class of a task: one of :data:`TASKS` or :data:`ALIASES`, or ``module:Class``; UserError for another."""
    known = name.replace("_", "-")
    known = ALIASES.get(known, known)
    if known in TASKS:
        return TASKS[known]
    if ":" in name:
        found = load_class("--task", name, Task)  # type: ignore[type-abstract]  # what is loaded is concrete
        for attribute in ("name", "headline", "lenient"):
            if not hasattr(found, attribute):
                raise UserError(f"--task: '{name}' lacks the attribute '{attribute}'; see docs/tasks.md")
        return found
    raise UserError(f"--task: no task '{name}'; expected {AUTO}, {', '.join(TASKS)} or module:Class")


def users_source(task: Task) -> str | None:
    """The fingerprint of the file that a user's task is written in; None for a task of this package."""
    module = type(task).__module__
    if module.startswith("stepjepa."):
        return None
    file = getattr(sys.modules[module], "__file__", None)
    return None if file is None else fingerprint(file)


def choose_task(name: str, records: Sequence[Record], options: TaskOptions = Task.options) -> Task:
    """The task of a name, or with ``auto`` the first that recognises the records.

    UserError if ``auto`` recognises some of the records but not all, or an option is set that the task has no use for.
    """
    kind = _recognise(records) if name == AUTO else load_task(name)
    for field in fields(TaskOptions):
        if field.name in kind.takes or getattr(options, field.name) == field.default:
            continue
        if name == AUTO and field.name == "spider_path":
            # The published drivers name it for every data set.
            print(f"note: --spider_path does nothing with task '{kind.name}'", file=sys.stderr)
        else:
            raise UserError(f"--{field.name} does nothing with task '{kind.name}'; leave it out or name another task")
    return kind.from_options(options)


def _recognise(records: Sequence[Record]) -> type[Task]:
    for name, kind in TASKS.items():
        strangers = [record for record in records if not kind.recognises(record)]
        if not strangers:
            break
        if len(strangers) < len(records):
            told = f"{len(records) - len(strangers)} of {len(records)} records look like '{name}', but not this one"
            remedy = f"pass --task {name} or --task generic"
            raise record_error(strangers[0], f"task '{AUTO}' can't decide: {told}; {remedy}")
    return kind


def keep(task: Task, records: Sequence[Record]) -> tuple[dict[int, Record], dict[str, int]]:
    """The records that a task evaluates, by their position, and how many it leaves out for which reason.

    UserError if none is left, or one has no truth that the task can use.
    """
    kept: dict[int, Record] = {}
    left_out: Counter[str] = Counter()
    for index, record in enumerate(records):
        reason = task.left_out(record) if record.answer.strip() else "answer without text (a tool call)"
        if reason is None:
            # A record without a usable truth must not stop a run after an hour of generating.
            task.truth(record)
            kept[index] = record
        else:
            left_out[reason] += 1
    if not kept:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in left_out.most_common())
        raise UserError(f"no record is left ({reasons}); name another --test_file or --task", path=records[0].path)
    return kept, dict(left_out)


def with_published_rules(task: Task) -> Task:
    """A task that puts the verdict of the published LLM-JEPA evaluation first, and its own scores beside it.

    ``reference`` follows the script where it is right and where it is not; ``reference_prefix`` is its
    ``--startswith``: for every task, the answer begins with the truth. Not reproduced: the script cuts prompts, and
    gives queries to a shell that may write, takes a fence for SQL, and prints what ran before a statement that fails.
    """

    class Reference(type(task)):  # type: ignore[misc]
        name = f"{task.name}-reference"
        headline = "reference"
        lenient = beginning = "reference_prefix"
        __module__ = type(task).__module__

        def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
            own = super().score_all(records, responses)
            return [_published_first(task.name, *each) for each in zip(records, responses, own, strict=True)]

    return Reference.from_options(task.options)


def _published_first(name: str, record: Record, response: Response, own: Scored) -> Scored:
    said = response.text.strip().removesuffix("<|end|>").strip()
    if name == "hellaswag" and response.likelihoods is not None:
        said = own.extracted["answer"] or ""
    match name:
        case "nq-open":
            # So an empty answer is right, and so is "a".
            verdict = any(part in record.answer for part in said.split("; "))
        case "gsm8k":
            # Nothing marked equals nothing marked. Without MULTILINE, the marked line must be the last one.
            marked, true = (re.search(r"\n#### (.+)$", text) for text in (said, record.answer))
            verdict = (marked and marked[1]) == (true and true[1])
        case "spider":
            # What the sqlite3 shell prints: a query that fails prints nothing, as one that finds nothing.
            # A thought in front of a query makes a statement that fails.
            printed = own.extracted["answer_output"] if response.content == response.text else None
            verdict = own.extracted["truth_output"] == printed
        case _:
            verdict = said == record.answer
    scores = {"reference": verdict, "reference_prefix": said.startswith(record.answer), **own.scores}
    return Scored(scores, own.extracted, None if verdict else own.error or WRONG)
