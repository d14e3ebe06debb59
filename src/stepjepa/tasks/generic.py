"""Answers that are compared as text: regular expressions, SQL as written, labels, names."""

from __future__ import annotations

from stepjepa.records import Record
from stepjepa.scoring import text_scores
from stepjepa.tasks.base import Scored


class GenericTask:
    """The truth is the last assistant message; the answer is all that the model said.

    Scores: ``exact``, ``prefix`` (the truth comes first, perhaps the model ran on), ``contains``.
    """

    name = "generic"
    headline = "exact"
    lenient = "prefix"

    def recognises(self, record: Record) -> bool:
        """Any record can be compared as text."""
        return True

    def truth(self, record: Record) -> str:
        """The last assistant message."""
        return record.answer

    def score(self, record: Record, generated: str) -> Scored:
        """Compare as text."""
        return Scored(text_scores(generated, record.answer))
