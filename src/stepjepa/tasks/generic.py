"""Answers that are compared as text, whatever they are."""

from __future__ import annotations

from stepjepa.answers.scoring import text_scores
from stepjepa.data.records import Record
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, task


@task("generic")
class GenericTask(Task):
    """The truth is the last assistant message; the answer is all that the model said.

    Scores: ``exact``, ``prefix`` (the truth comes first, perhaps the model ran on), ``contains``.
    """

    headline = "exact"
    lenient = "prefix"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        return True

    def truth(self, record: Record) -> str:
        return record.answer

    def score(self, record: Record, response: Response) -> Scored:
        scores = text_scores(response.text, record.answer)
        error = None if scores["exact"] else WRONG if response.text.strip() else NO_ANSWER
        return Scored(scores, error=error)
