"""Retrieval on held-out records while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.evaluation.output import RETRIEVAL_METRICS
from stepjepa.evaluation.retrieval import answer_names, rank_targets
from stepjepa.objectives.view_embeddings import ViewEmbeddings
from stepjepa.tasks.base import Task


class EmbedsPairs(Protocol):
    """The part of ``Jepa`` that :class:`RetrievalScores` uses."""

    config: JepaConfig

    def embed_pairs(self, records: Sequence[Record], *, batch_size: int = ...) -> ViewEmbeddings: ...


class RetrievalScores:
    """Retrieval on held-out records while a model trains.

    Args:
        records: held-out records.
        task: decides which answers are equal; None if only equal texts are.
    """

    names = RETRIEVAL_METRICS

    def __init__(self, records: Sequence[Record], task: Task | None = None) -> None:
        self._records, self._task = list(records), task
        self._names: list[str | None] | None = None

    def __call__(self, jepa: EmbedsPairs, batch_size: int) -> dict[str, float]:
        """Return the mean of each metric of ``output.RETRIEVAL_METRICS``, the same in all processes."""
        if self._names is None:
            names = self._task and answer_names(self._task, self._records, jepa.config)
            self._names = names or [None] * len(self._records)
        embeddings = jepa.embed_pairs(self._records, batch_size=batch_size)
        return rank_targets(embeddings, self._names, jepa.config).means()
