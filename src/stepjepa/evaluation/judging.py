"""Score answers: one line per question, with the kind of error, and a majority vote of several samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.evaluation.settings import EvaluationSettings, ScoreSettings
from stepjepa.evaluation.summary import summarise
from stepjepa.tasks.base import WRONG, Likelihood, Response, Scored, Task, TaskOptions
from stepjepa.tasks.registry import ReferenceTask, choose_task, keep

RAN_ON = "ran on"


class Answer(NamedTuple):
    """A generated answer."""

    text: str
    """The text before the first stop token, without special tokens."""
    stopped: bool | None = None
    """Whether the model ended its turn by itself; None if unknown."""
    new_tokens: int | None = None
    """Number of generated tokens, including the stop token; None if unknown."""


@dataclass(frozen=True, slots=True)
class Question:
    """A record that is answered."""

    index: int
    """Position in the test file, from 0."""
    record: Record
    prompt: str | None = None
    """The prompt as text; None if another program rendered it."""
    likelihoods: Mapping[str, Likelihood] | None = None
    """Likelihoods of the task's continuations, by label; None if there are none or another program answered."""


@dataclass(frozen=True)
class Selection:
    """The task of a test file and the records that are evaluated."""

    task: Task
    headline: str
    """The score that decides what is an error."""
    records: dict[int, Record]
    """The records by position in the test file."""
    left_out: dict[str, int]
    """Number of records that are not evaluated, by reason."""

    def options(self, options: TaskOptions) -> dict[str, Any]:
        """The task options that affect the scores."""
        return {name: getattr(options, name) for name in self.task.takes if name != "workers"}

    def summarise(self, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The part of a summary that is computed from the lines."""
        return {
            "left_out": self.left_out,
            "task": self.task.name,
            "lenient": self.task.lenient,
            **summarise(lines, self.headline),
            "details": self.task.details(lines),
        }


def select_records(settings: EvaluationSettings | ScoreSettings, records: Sequence[Record]) -> Selection:
    """Choose the task of a test file and the records that it can score.

    Raises:
        UserError: no record is left, or the task does not exist or lacks a setting.
    """
    task = choose_task(settings.task, records, settings.task_options)
    if settings.scoring == "reference":
        task = ReferenceTask(task)
    return Selection(task, task.beginning if settings.startswith else task.headline, *keep(task, records))


def judge(
    task: Task, questions: Sequence[Question], answers: Sequence[Sequence[Answer]], headline: str | None = None
) -> list[dict[str, Any]]:
    """Score answers.

    Args:
        task: scores the answers.
        questions: the records that are answered.
        answers: the samples of each question, the same number for all.
        headline: the score that decides what is an error; by default that of the task.

    Returns:
        One line per question: ``index``, ``prompt``, ``truth``, ``generated``, ``extracted``, ``scores``, ``error``,
        ``stopped``, ``new_tokens`` and, if there are any, ``likelihoods``. With several samples ``scores`` are their
        means, beside ``pass@1`` (the mean of the headline), ``pass@n`` (one sample is right) and ``majority`` (the
        majority answer is right); ``generated``, ``extracted`` and ``error`` are those of the majority answer, and
        ``samples`` holds all of them.

    Raises:
        UserError: the task has no such score.
    """
    flat = [(question, answer) for question, given in zip(questions, answers, strict=True) for answer in given]
    responses = [Response(answer.text, question.likelihoods) for question, answer in flat]
    verdicts = task.score_all([question.record for question, _ in flat], responses)
    name = headline or task.headline
    for scored in verdicts:
        if name not in scored.scores:
            hint = "; leave --startswith out" if name == task.beginning != task.headline else ""
            raise UserError(f"task '{task.name}' has no score '{name}', only {', '.join(scored.scores)}{hint}")
    lines, start = [], 0
    for question, given in zip(questions, answers, strict=True):
        part = slice(start, start + len(given))
        start += len(given)
        # Where likelihoods decide, a text that was cut off is not the reason of an error.
        by_text = question.likelihoods is None
        samples = [_sample(answer, scored, name, by_text) for answer, scored in zip(given, verdicts[part], strict=True)]
        line: dict[str, Any] = {
            "index": question.index,
            "prompt": question.prompt,
            "truth": task.truth(question.record),
        }
        if len(samples) == 1:
            line |= samples[0]
        else:
            votes = map(task.vote, verdicts[part], responses[part])
            line |= _combine(samples, list(votes), name)
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


def _combine(samples: Sequence[dict[str, Any]], votes: Sequence[str | None], headline: str) -> dict[str, Any]:
    """The fields of a line with several samples."""
    # The majority answer is the first sample with the most frequent vote; of equally frequent ones the first counts.
    counts = Counter(vote for vote in votes if vote is not None)
    chosen = samples[votes.index(counts.most_common(1)[0][0]) if counts else 0]
    right = [sample["scores"][headline] for sample in samples]
    scores = {name: fmean(sample["scores"][name] for sample in samples) for name in chosen["scores"]}
    scores |= {
        "pass@1": fmean(right),
        f"pass@{len(samples)}": any(right),
        "majority": chosen["scores"][headline],
    }
    stopped = [sample["stopped"] for sample in samples]
    tokens = [sample["new_tokens"] for sample in samples]
    return {
        **chosen,
        "scores": scores,
        "stopped": None if None in stopped else fmean(stopped),
        "new_tokens": None if None in tokens else sum(tokens),
        "samples": list(samples),
    }
