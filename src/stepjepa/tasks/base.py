"""What a task is: how the right answer of a record is found, and how the answer of a model is scored.

A new task is a class derived from :class:`Task` in a file of this folder. One of your own is named on the command line
by where it is, ``--task my_module:MyTask``.
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
from stepjepa.data.records import Record
from stepjepa.tasks.workers import Outcome, Workers

# Why an answer is wrong.
NO_ANSWER = "no answer found"
WRONG = "wrong answer"
FAILED = "execution failed"
TIMED_OUT = "timed out"

# What operating systems accept.
_SECONDS: Range = (lambda value: 0 < value <= 86400, "more than 0 and at most 86400")
_MEBIBYTES: Range = (lambda value: 0 < value <= 2**30, f"more than 0 and at most {2**30}")


def record_error(record: Record, message: str) -> UserError:
    """The error for a record that a task can't use, with its file and line."""
    return UserError(message, path=record.path, line=record.line)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text whose likelihood a task asks for, behind a context: plain text, or None for the record's own prompt."""

    label: str
    text: str
    context: str | None = None


class Likelihood(NamedTuple):
    """How probable a continuation is."""

    log_probability: float  # natural logarithm, of all its tokens
    tokens: int  # how many those are


@dataclass(frozen=True, slots=True)
class Response:
    """What a model answered to a record, without special tokens, and the likelihoods of :meth:`Task.continuations`."""

    text: str  # all of it, thoughts included
    likelihoods: Mapping[str, Likelihood] | None = None  # by label; None for answers that another program generated
    in_thought: bool = False  # the prompt has opened a thought, so the text begins inside it

    @property
    def content(self) -> str:
        """The part that is meant as the answer: what stands behind a thought, or in harmony's final channel."""
        return content_part(self.text, in_thought=self.in_thought)


@dataclass(frozen=True, slots=True)
class Scored:
    """The verdict on one response."""

    # By name, True and False or numbers of which the mean makes sense; the same names for all records.
    scores: dict[str, bool | float]
    # What was read out of the truth and of the response, by name; None where nothing was found.
    extracted: dict[str, str | None] = field(default_factory=dict)
    error: str | None = None  # why the headline score is not reached, one of the constants above


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Settings of the tasks; each task names those it uses in :attr:`Task.takes`."""

    spider_path: str | None = option(None, "databases of Spider, <DIR>/<name>/<name>.sqlite", metavar="DIR")
    missing_databases: Literal["error", "skip"] = option(
        "error", "a record whose database is missing; skip: leave it out"
    )
    time_limit: float = option(10.0, "for a query, or for two regular expressions", metavar="SEC", allowed=_SECONDS)
    memory_limit: int = option(2048, "for the same", metavar="MIB", allowed=_MEBIBYTES)
    workers: int | None = option(None, "processes for the same (one per core, 8 at most)", allowed=FROM_ONE)

    def __post_init__(self) -> None:
        check_values(self)


class Task(ABC):
    """How the records of one kind are scored."""

    name: ClassVar[str]
    headline: ClassVar[str]  # the score that counts when only one is shown
    lenient: ClassVar[str]  # the score that overlooks what follows the right answer
    beginning: ClassVar[str] = "prefix"  # the score of answers that begin right, the headline with --startswith
    takes: ClassVar[tuple[str, ...]] = ()  # the fields of TaskOptions that make a difference to this task
    system_prompt: ClassVar[str] = ""  # recognises the data set's records; empty for none
    file_names: ClassVar[tuple[str, ...]] = ()  # how the names of its files begin, in lower case with _; the same
    asked: ClassVar[int] = 0  # 'auto' asks higher ones later: those that know a record by what its answer looks like
    options: TaskOptions = TaskOptions()
    _workers: Workers | None = None

    @classmethod
    def from_options(cls, options: TaskOptions) -> Self:
        """The task with the user's settings; UserError where one that it needs is missing or wrong."""
        made = cls()
        made.options = options
        return made

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """Whether a record is of this task, for ``--task auto``: by its system prompt, or the name of its file."""
        file = Path(record.path).name.lower().replace("-", "_")
        prompt = {"role": "system", "content": cls.system_prompt}
        return file.startswith(cls.file_names) or bool(cls.system_prompt and record.messages[0] == prompt)

    def left_out(self, record: Record) -> str | None:
        """Why a record is not evaluated at all, the same words for like records; None for one that is."""
        return None

    @abstractmethod
    def truth(self, record: Record) -> str:
        """The right answer of a record, as text for people; UserError where it has none that this task can use."""

    @abstractmethod
    def score(self, record: Record, response: Response) -> Scored:
        """Judge a response; raises as :meth:`truth`."""

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        """Judge several responses."""
        return [self.score(record, response) for record, response in zip(records, responses, strict=True)]

    def continuations(self, record: Record) -> Sequence[Continuation]:
        """Texts whose likelihoods the model is asked for, different labels each."""
        return ()

    def vote(self, scored: Scored, response: Response) -> str | None:
        """What a response votes for when several samples of one record decide by majority; None for nothing."""
        return scored.extracted.get("answer", response.content.strip()) or None

    def details(self, lines: Sequence[JsonObject]) -> JsonObject:
        """What else the summary should say of the lines of an evaluation, as JSON: tables by class, by difficulty."""
        return {}

    def run_within_limits(
        self, function: Callable[..., object], calls: Sequence[tuple[object, ...]], seconds: float
    ) -> list[Outcome]:
        """Call a function, always the same, with each tuple of arguments in processes with limits."""
        if self._workers is None:
            limits = self.options
            self._workers = Workers(function, seconds=seconds, memory=limits.memory_limit, processes=limits.workers)
        return self._workers.map(calls)

    def close(self) -> None:
        """End processes; the task is not used again."""
        if self._workers is not None:
            self._workers.close()
