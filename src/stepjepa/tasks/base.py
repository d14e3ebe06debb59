"""What a task is: how the truth of a record is found, and how what a model said to it is judged.

A new task is a class derived from :class:`Task`. The built-in ones are listed in ``tasks.registry``; one of your own
is named on the command line by where it stands, ``--task my_module:MyTask``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from stepjepa.data.records import Record
from stepjepa.errors import UserError

# Why an answer is wrong. That it was cut off is noted by the evaluation, which knows.
NO_ANSWER = "no answer found"
WRONG = "wrong answer"
FAILED = "execution failed"
TIMED_OUT = "timed out"

MISSING_DATABASES = ("error", "skip")
# A day in seconds, a pebibyte in MiB: what operating systems can be told with room to spare.
LONGEST_TIME, MOST_MEMORY = 86400, 2**30


class Unusable(ValueError):  # noqa: N818  # a verdict on a row, not a mishap
    """A row of a raw data set that no record can be made of; the message is the reason, the same for like rows."""


def chat_record(system: str, user: str, assistant: str, **extra: Any) -> dict[str, Any]:
    """A training record of three messages.

    Args:
        system: what the task is, the same for all records of a data set.
        user: the question, the source view of LLM-JEPA.
        assistant: the answer, its target view.
        extra: other fields of the record.
    """
    contents = {"system": system, "user": user, "assistant": assistant}
    return {"messages": [{"role": role, "content": content} for role, content in contents.items()], **extra}


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text whose likelihood a task wants to know.

    Attributes:
        label: names it in :attr:`Response.likelihoods`.
        text: what is continued with.
        context: what comes before, as plain text; None for the record's own prompt in the chat template.
    """

    label: str
    text: str
    context: str | None = None


class Likelihood(NamedTuple):
    """How likely a model finds a continuation.

    Attributes:
        log_probability: natural logarithm of the probability of all its tokens.
        tokens: how many those are.
    """

    log_probability: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Response:
    """What a model said to a record.

    Attributes:
        text: generated before the model stopped, special tokens left out.
        likelihoods: of what :meth:`Task.continuations` asked for, by label; None where there is no model to ask, as
            for answers that another program generated.
    """

    text: str
    likelihoods: Mapping[str, Likelihood] | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of one response.

    Attributes:
        scores: by name; True and False, or numbers of which the mean makes sense. The names are the same for every
            record of a task, unless some are only measured with likelihoods.
        extracted: what was read out of the truth and of the response, by name; None where nothing was found.
        error: why the headline score is not reached, one of the constants above; None for ``wrong answer``.
    """

    scores: dict[str, bool | float]
    extracted: dict[str, str | None] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What the user may set of the tasks; each task takes what it has use for.

    Attributes:
        spider_path: folder with one folder per database, ``<name>/<name>.sqlite``.
        missing_databases: ``error``, or ``skip`` to leave out and count the records whose database is not there.
        last_number: also score, as ``last_number_correct``, a response that marks no answer by its last number.
        time_limit: seconds for deciding about one answer, where code is run for that.
        memory_limit: MiB for the same.
        workers: processes that run code; None for one per CPU core, 8 at most.

    Raises:
        UserError: a value is out of range.
    """

    spider_path: str | None = None
    missing_databases: str = "error"
    last_number: bool = False
    time_limit: float = 10.0
    memory_limit: int = 2048
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.missing_databases not in MISSING_DATABASES:
            known = " or ".join(MISSING_DATABASES)
            raise UserError(f"--missing_databases: expected {known}, got '{self.missing_databases}'")
        most = {"time_limit": LONGEST_TIME, "memory_limit": MOST_MEMORY, "workers": math.inf}
        for name, value in {name: getattr(self, name) for name in most}.items():
            # Not "value <= 0", which a time that is no number would pass.
            if value is not None and not 0 < value <= most[name]:
                limit = "" if most[name] == math.inf else f" and at most {most[name]}"
                raise UserError(f"--{name}: expected more than 0{limit}, got {value}")


class Task(ABC):
    """How the records of one kind are scored.

    Attributes:
        name: as given to ``--task``.
        headline: the score that counts when only one is shown.
        lenient: the score that overlooks what follows the right answer; beside the headline it shows how much of that
            is stopping at the right place.
        beginning: the score of answers that begin right, the headline with ``--startswith``.
        takes: the fields of :class:`TaskOptions` that make a difference to this task.
    """

    name: ClassVar[str]
    headline: ClassVar[str]
    lenient: ClassVar[str]
    beginning: ClassVar[str] = "prefix"
    takes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_options(cls, options: TaskOptions) -> Self:
        """The task with the user's settings.

        Raises:
            UserError: a setting that the task needs is missing or wrong.
        """
        return cls()

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """Whether a record is of this task, by its content or by the name of its file; asked for ``--task auto``."""
        return False

    def left_out(self, record: Record) -> str | None:
        """Why a record is not evaluated at all, the same words for like records; None for one that is."""
        return None

    @abstractmethod
    def truth(self, record: Record) -> str:
        """The right answer of a record, as text for people.

        Raises:
            UserError: the record has none that this task can use.
        """

    @abstractmethod
    def score(self, record: Record, response: Response) -> Scored:
        """Judge a response.

        Raises:
            UserError: as :meth:`truth`.
        """

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        """Judge several responses; for tasks that have them judged side by side in processes of their own."""
        return [self.score(record, response) for record, response in zip(records, responses, strict=True)]

    def continuations(self, record: Record) -> Sequence[Continuation]:
        """Texts whose likelihoods the model is asked for, different labels each."""
        return ()

    def vote(self, scored: Scored, response: Response) -> str | None:
        """What a response votes for when several samples of one record decide by majority; None for nothing."""
        return scored.extracted.get("answer", response.text.strip()) or None

    def details(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What else the summary should say, from all lines of an evaluation: tables by class, by difficulty.

        Args:
            lines: at least one, as ``evaluation`` writes them; before an evaluation goes on those that it has, to see
                whether they are sound.

        Returns:
            Values that JSON can hold.
        """
        return {}

    def close(self) -> None:
        """Let go of processes; the task is not used again."""
        return
