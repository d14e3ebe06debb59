"""From answers to scored lines: one sample or several, errors named, a majority of samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.evaluation.summary import summarise
from stepjepa.tasks.base import WRONG, Likelihood, Response, Scored, Task, TaskOptions
from stepjepa.tasks.reference import ReferenceTask
from stepjepa.tasks.registry import choose_task, keep

RAN_ON = "ran on"


class Answer(NamedTuple):
    """What a model, or another program, said."""

    text: str
    """Everything before the first stop token, special tokens left out."""
    stopped: bool | None = None
    """The model ended its turn by itself; None where nobody knows."""
    new_tokens: int | None = None
    """How many tokens it generated, the stop token included; None where nobody knows."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an answer belongs to."""

    index: int
    """Position in the test file, counted from 0."""
    record: Record
    prompt: str | None = None
    """The text that the model was shown; None where another program made it."""
    likelihoods: Mapping[str, Likelihood] | None = None
    """Of the continuations that the task asked for."""


@dataclass(frozen=True)
class Asked:
    """The records of a test file that are evaluated, and their task."""

    task: Task
    headline: str
    """The score that decides what is an error."""
    records: dict[int, Record]
    """By position in the test file."""
    left_out: dict[str, int]
    """How many records are not evaluated, by reason."""

    def options(self, options: TaskOptions) -> dict[str, Any]:
        """The options that make a difference to this task's scores."""
        return {name: getattr(options, name) for name in self.task.takes if name != "workers"}

    def summarise(self, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The part of a summary that follows from the lines."""
        return {
            "left_out": self.left_out,
            "task": self.task.name,
            "lenient": self.task.lenient,
            **summarise(lines, self.headline),
            "details": self.task.details(lines),
        }


def choose_records(settings: Any, records: Sequence[Record]) -> Asked:
    """The task of a test file and the records that it can score.

    Args:
        settings: with ``task``, ``task_options``, ``scoring`` and ``startswith``.
        records: of the test file.

    Raises:
        UserError: no record is left, or the task can't be made.
    """
    task = choose_task(settings.task, records, settings.task_options)
    if settings.scoring == "reference":
        task = ReferenceTask(task)
    return Asked(task, task.beginning if settings.startswith else task.headline, *keep(task, records))


def judge(
    task: Task, questions: Sequence[Question], answers: Sequence[Sequence[Answer]], headline: str | None = None
) -> list[dict[str, Any]]:
    """Score answers and make their lines.

    Args:
        task: knows what is right.
        questions: the examples.
        answers: for each of them one answer or several samples, equally many.
        headline: the score that decides what is an error; the task's own by default.

    Returns:
        For each question ``index``, ``prompt``, ``truth``, ``generated``, ``extracted``, ``scores``, ``error``,
        ``stopped``, ``new_tokens`` and, where they were measured, ``likelihoods``. With several samples ``scores``
        are their means, beside ``pass@1`` (the mean of the headline), ``pass@n`` (one of them is right) and
        ``majority`` (what most of them say is right); ``generated``, ``extracted`` and ``error`` are those of the
        majority, and ``samples`` holds every one.

    Raises:
        UserError: the task has no such score.
    """
    flat = [(question, answer) for question, said in zip(questions, answers, strict=True) for answer in said]
    responses = [Response(answer.text, question.likelihoods) for question, answer in flat]
    verdicts = task.score_all([question.record for question, _ in flat], responses)
    name = headline or task.headline
    for scored in verdicts:
        if name not in scored.scores:
            hint = "; leave --startswith out" if name == task.beginning != task.headline else ""
            raise UserError(f"task '{task.name}' has no score '{name}', only {', '.join(scored.scores)}{hint}")
    lines, at = [], 0
    for question, said in zip(questions, answers, strict=True):
        part = slice(at, at + len(said))
        at += len(said)
        # A verdict on likelihoods is none on where the text was cut off.
        by_text = question.likelihoods is None
        samples = [_sample(answer, scored, name, by_text) for answer, scored in zip(said, verdicts[part], strict=True)]
        line: dict[str, Any] = {
            "index": question.index,
            "prompt": question.prompt,
            "truth": task.truth(question.record),
        }
        if len(samples) == 1:
            line |= samples[0]
        else:
            votes = map(task.vote, verdicts[part], responses[part])
            line |= _together(samples, list(votes), name)
        if question.likelihoods is not None:
            line["likelihoods"] = {label: list(found) for label, found in question.likelihoods.items()}
        lines.append(line)
    return lines


def _sample(answer: Answer, scored: Scored, headline: str, by_text: bool) -> dict[str, Any]:
    error = None
    if not scored.scores[headline]:
        error = RAN_ON if by_text and answer.stopped is False else scored.error or WRONG
    return {
        "generated": answer.text,
        "extracted": scored.extracted,
        "scores": scored.scores,
        "error": error,
        "stopped": answer.stopped,
        "new_tokens": answer.new_tokens,
    }


def _together(samples: Sequence[dict[str, Any]], votes: Sequence[str | None], headline: str) -> dict[str, Any]:
    """One line's worth of several samples."""
    chosen = samples[_majority(votes)]
    right = [sample["scores"][headline] for sample in samples]
    scores = {name: _mean([sample["scores"][name] for sample in samples]) for name in chosen["scores"]}
    scores |= {
        "pass@1": _mean(right),
        f"pass@{len(samples)}": any(right),
        "majority": chosen["scores"][headline],
    }
    stopped = [sample["stopped"] for sample in samples]
    tokens = [sample["new_tokens"] for sample in samples]
    return {
        **chosen,
        "scores": scores,
        "stopped": None if None in stopped else _mean(stopped),
        "new_tokens": None if None in tokens else sum(tokens),
        "samples": list(samples),
    }


def _mean(values: Sequence[bool | float]) -> float:
    return math.fsum(values) / len(values)


def _majority(votes: Sequence[str | None]) -> int:
    """The first sample that says what most samples say; of equally frequent ones, what was said first."""
    counts = Counter(vote for vote in votes if vote is not None)
    return votes.index(max(counts, key=counts.__getitem__)) if counts else 0
