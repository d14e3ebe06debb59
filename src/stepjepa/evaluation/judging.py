"""Score answers, one line per record; the interface of the engines that answer."""

import collections.abc
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol, TypeAlias

from stepjepa.base.json_object import JsonObject
from stepjepa.chat.content import opens_thought
from stepjepa.data.record import Record
from stepjepa.evaluation.verdicts import score_checked
from stepjepa.models.sampling import Answer
from stepjepa.tasks.base import WRONG, Likelihood, Response, Scored, Task

RAN_ON = "ran on"
"""The error of an answer that was cut off at the maximum number of tokens."""


@dataclass(frozen=True, slots=True)
class Question:
    """A record that is answered."""

    index: int  # position in the test file, from 0
    record: Record
    prompt: str | None = None  # as text; None if another program rendered it
    # Likelihoods of the task's continuations, by label; None without continuations or where another program answered.
    likelihoods: Mapping[str, Likelihood] | None = None


def judge(
    task: Task, questions: Sequence[Question], answers: Sequence[Sequence[Answer]], headline: str | None = None
) -> list[JsonObject]:
    """Score the answers to questions, equally many samples to each, and return one line per question.

    A line has ``index``, ``prompt``, ``truth``, ``generated``, ``extracted``, ``scores``, ``error``, ``stopped``,
    ``new_tokens`` and, if there are any, ``likelihoods``. With several samples ``scores`` are their means, beside
    ``pass@1`` (the mean of the headline), ``pass@n`` (one sample is right) and ``majority`` (the majority answer is
    right); ``generated``, ``extracted`` and ``error`` are those of the majority answer, ``samples`` holds all of them.

    Args:
        task: scores them.
        questions: the records.
        answers: the samples of each record.
        headline: the score that decides what is an error; None for that of the task.

    Raises:
        UserError: the task has no such score, or its verdict can't be used.
    """
    flat = [(question, answer) for question, texts in zip(questions, answers, strict=True) for answer in texts]
    responses = [
        Response(answer.text, question.likelihoods, opens_thought(question.prompt)) for question, answer in flat
    ]
    name = headline or task.headline
    verdicts = score_checked(task, [question.record for question, _ in flat], responses, name)
    judged = iter(zip(verdicts, responses, strict=True))
    lines = []
    for question, texts in zip(questions, answers, strict=True):
        samples, votes = [], []
        for answer in texts:
            scored, response = next(judged)
            # If likelihoods decide, a text that was cut off is not the cause of an error.
            samples.append(_sample(answer, scored, name, by_text=question.likelihoods is None))
            votes.append(task.vote(scored, response) if len(texts) > 1 else None)
        truth = task.truth(question.record)
        line: JsonObject = {"index": question.index, "prompt": question.prompt, "truth": truth}
        line |= samples[0] if len(samples) == 1 else _combine(samples, votes, name)
        if question.likelihoods is not None:
            line["likelihoods"] = {label: list(value) for label, value in question.likelihoods.items()}
        lines.append(line)
    return lines


def _sample(answer: Answer, scored: Scored, headline: str, *, by_text: bool) -> JsonObject:
    """Return the fields of a line for one sample."""
    reason = RAN_ON if by_text and answer.stopped is False else scored.error or WRONG
    return {
        "generated": answer.text,
        "extracted": scored.extracted,
        "scores": scored.scores,
        "error": None if scored.scores[headline] else reason,
        "stopped": answer.stopped,
        "new_tokens": answer.new_tokens,
    }


def _combine(samples: Sequence[JsonObject], votes: Sequence[str | None], headline: str) -> JsonObject:
    """Return the fields of a line for several samples: mean scores, pass@N and the majority answer."""
    # The majority answer is the first sample with the most frequent vote; of equally frequent ones the first counts.
    counts = Counter(vote for vote in votes if vote is not None)
    chosen = samples[votes.index(counts.most_common(1)[0][0]) if counts else 0]
    right = [sample["scores"][headline] for sample in samples]
    scores = {name: fmean(sample["scores"][name] for sample in samples) for name in chosen["scores"]}
    scores |= {"pass@1": fmean(right), f"pass@{len(samples)}": any(right), "majority": chosen["scores"][headline]}
    stopped, tokens = ([sample[name] for sample in samples] for name in ("stopped", "new_tokens"))
    return {
        **chosen,
        "scores": scores,
        "stopped": None if None in stopped else fmean(stopped),
        "new_tokens": None if None in tokens else sum(tokens),
        "samples": list(samples),
    }


LineBatches: TypeAlias = collections.abc.Generator[list[JsonObject], None, None]
"""An iterator of scored lines, some at a time; a caller that stops early must close it."""


class Engine(Protocol):
    """Answers records and scores the answers: ``answering.Batcher``, the built-in one, or ``server.ServerEngine``."""

    def answer_missing(self, done: Container[int]) -> LineBatches:
        """Yield the scored lines of the records whose index is not in ``done``, as they are finished.

        ``done`` may grow meanwhile by the lines that were yielded. Lines are those of :func:`judge` with ``gold_loss``,
        the LM loss per token of the right answer (None without likelihoods), and ``gold_tokens``.
        """
        ...
