"""The interface of tasks: a task reads the gold answer of a record and scores the answer of a model.

A new task is a class derived from :class:`Task` in a file of this folder. A custom task is named by its module and
class, ``my_module:MyTask``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.chat.content import content_part
from stepjepa.config.option import FROM_ONE, Range, check_values, option
from stepjepa.data.record import Record
from stepjepa.tasks.workers import Outcome, Workers

# Reasons why an answer is wrong.
NO_ANSWER = "no answer found"
WRONG = "wrong answer"
FAILED = "execution failed"
TIMED_OUT = "timed out"

# Ranges that operating systems accept.
_SECONDS: Range = (lambda value: 0 < value <= 86400, "more than 0 and at most 86400")
_MEBIBYTES: Range = (lambda value: 0 < value <= 2**30, f"more than 0 and at most {2**30}")


def record_error(record: Record, message: str) -> UserError:
    """Make the error for a record that a task can't use, with its file and line."""
    return UserError(message, path=record.path, line=record.line)


def right_answer(record: Record) -> str:
    """Return the right answer of a record, without the thought in front of it; the whole one if nothing is behind."""
    content = content_part(record.answer)
    return content.strip() if content.strip() and content != record.answer else record.answer


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text whose likelihood a task needs, after a context: plain text, or None for the record's own prompt."""

    label: str
    text: str
    context: str | None = None


class Likelihood(NamedTuple):
    """The likelihood of a continuation."""

    log_probability: float  # natural logarithm, summed over its tokens
    tokens: int  # number of its tokens


@dataclass(frozen=True, slots=True)
class Response:
    """The answer of a model to a record, without special tokens, and the likelihoods of :meth:`Task.continuations`."""

    text: str  # the whole answer, thoughts included
    likelihoods: Mapping[str, Likelihood] | None = None  # by label; None for external predictions
    in_thought: bool = False  # the prompt has opened a thought, so the text begins inside it

    @property
    def content(self) -> str:
        """The answer without thoughts: the text after a thought, or harmony's final channel."""
        return content_part(self.text, in_thought=self.in_thought)


@dataclass(frozen=True, slots=True)
class Scored:
    """The verdict on one response."""

    # Score name -> bool or number that can be averaged; the same names for all records.
    scores: dict[str, bool | float]
    # Values extracted from the truth and the response, by name; None if there is no such value.
    extracted: dict[str, str | None] = field(default_factory=dict)
    error: str | None = None  # reason why the headline score is not reached, one of the constants above


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Settings of the tasks; each task lists those it uses in :attr:`Task.used_options`."""

    spider_path: str | None = option(None, "databases of Spider, <DIR>/<name>/<name>.sqlite", metavar="DIR", path=True)
    missing_databases: Literal["error", "skip"] = option(
        "error", "a record whose database is missing: error, or skip to leave it out"
    )
    time_limit: float = option(
        10.0, "time limit of a query, or of comparing two regular expressions", metavar="SEC", allowed=_SECONDS
    )
    memory_limit: int = option(2048, "memory limit per check", metavar="MIB", allowed=_MEBIBYTES)
    workers: int | None = option(None, "processes that run checks (one per core, 8 at most)", allowed=FROM_ONE)

    def __post_init__(self) -> None:
        check_values(self)


_NEW_NAMES = {"asked": "detection_order", "takes": "used_options", "lenient": "secondary_score"}
"""Attribute of a task in 0.2.0 -> its name today; a custom task may use either."""


class Task(ABC):
    """Scores the records of one kind."""

    name: ClassVar[str]
    headline: ClassVar[str]  # the score that counts when only one is shown
    secondary_score: ClassVar[str]  # a more lenient score, which ignores text after the right answer
    beginning: ClassVar[str] = "prefix"  # the score that is the headline with `startswith`: the answer begins right
    used_options: ClassVar[tuple[str, ...]] = ()  # the fields of TaskOptions that this task uses
    system_prompt: ClassVar[str] = ""  # records with it are recognised as this task's; empty for none
    # Files whose names begin with one of these (lower case, _ for -) are recognised as this task's.
    file_names: ClassVar[tuple[str, ...]] = ()
    judges_calls: ClassVar[bool] = False  # records whose answer is a tool call without text are evaluated, too
    detection_order: ClassVar[int] = 0  # order in which 'auto' tries tasks; content heuristics come last
    options: TaskOptions = TaskOptions()
    names_of_first_verdict: tuple[str, ...] | None = None  # the scores that every further verdict must have, too
    _workers: Workers | None = None

    def __init_subclass__(cls, **arguments: object) -> None:
        """Give each attribute both its names, so that custom tasks written for 0.2.0 work."""
        super().__init_subclass__(**arguments)
        for old, new in _NEW_NAMES.items():
            if new in vars(cls) or old in vars(cls):
                value = vars(cls).get(new, vars(cls).get(old))
                setattr(cls, new, value)
                setattr(cls, old, value)

    @classmethod
    def from_options(cls, options: TaskOptions) -> Self:
        """Make the task with the user's settings; raise UserError if one that it needs is missing or wrong."""
        task = cls()
        task.options = options
        return task

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """Return whether a record is of this task, for the task ``auto``: by its system prompt or file name."""
        file = Path(record.path).name.lower().replace("-", "_")
        prompt = {"role": "system", "content": cls.system_prompt}
        return file.startswith(cls.file_names) or bool(cls.system_prompt and record.messages[0] == prompt)

    def left_out(self, record: Record) -> str | None:
        """Return the reason why a record is not evaluated, used as a counter key; None if it is evaluated."""
        return None

    @abstractmethod
    def truth(self, record: Record) -> str:
        """Return the gold answer of a record as text; raise UserError if it has none that this task can use."""

    @abstractmethod
    def score(self, record: Record, response: Response) -> Scored:
        """Judge a response; raises as :meth:`truth`."""

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        """Judge several responses."""
        return [self.score(record, response) for record, response in zip(records, responses, strict=True)]

    def continuations(self, record: Record) -> Sequence[Continuation]:
        """Return texts whose likelihoods under the model are needed, each with a unique label."""
        return ()

    def vote(self, scored: Scored, response: Response) -> str | None:
        """Return the answer that a response votes for when samples decide by majority; None for no vote."""
        return scored.extracted.get("answer", response.content.strip()) or None

    def answer_names(self, records: Sequence[Record]) -> list[str | None]:
        """Return a name for the right answer of each record, equal for equal answers with other texts; for retrieval.

        By default None: only answers with equal texts are equal.
        """
        return [None] * len(records)

    def details(self, lines: Sequence[JsonObject]) -> JsonObject:
        """Return further entries of the summary as JSON, such as tables by class or difficulty."""
        return {}

    def run_within_limits(
        self, function: Callable[..., object], calls: Sequence[tuple[object, ...]], seconds: float
    ) -> list[Outcome]:
        """Call a function with each tuple of arguments, in processes with limits of time and memory.

        Args:
            function: the same at every call of a task.
            calls: the arguments.
            seconds: the time limit of a call.
        """
        if self._workers is None:
            limits = self.options
            self._workers = Workers(function, seconds=seconds, memory=limits.memory_limit, processes=limits.workers)
        return self._workers.map(calls)

    def close(self) -> None:
        """End the worker processes; the task can't be used afterwards."""
        if self._workers is not None:
            self._workers.close()
