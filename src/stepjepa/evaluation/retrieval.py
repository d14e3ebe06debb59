"""Retrieval: how often the nearest of all distinct targets is the right one for a source.

Each source embedding is a query, each distinct target a candidate, and the candidates are ranked by cosine. A candidate
is right for a query if it has the text of the query's own target or, where the task can tell, an equal answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray

from stepjepa.base.json_object import JsonObject
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.evaluation.output import RETRIEVAL_METRICS, mean_with_interval
from stepjepa.objectives.precision import without_autocast
from stepjepa.objectives.view_embeddings import ViewEmbeddings
from stepjepa.tasks.base import Task

CUTOFF = 10
"""Rank at which hits and nDCG are cut off."""

RESAMPLES = 2000
"""Bootstrap samples of an interval."""

_COSINES = 2**24  # most cosines in memory at once

Ranks = Sequence[NDArray[np.int64]]
"""For each query the ranks of its right candidates, from 1, ascending."""


# -- metrics -----------------------------------------------------------------------------------------------------------


def ranks_of_right(source: ArrayLike, candidates: ArrayLike, right: Sequence[Sequence[int]]) -> Ranks:
    """Rank candidates by cosine, in float32, and return the ranks of the right ones.

    Of equally near candidates a wrong one ranks before a right one, so that collapsed embeddings score nothing. For the
    same reason a right candidate whose cosine is not finite ranks last, and a wrong one first. Equal candidates are
    multiplied once: where a vector stands in a matrix changes the last bit of its products.

    Args:
        source: ``[Q, D]`` embeddings of the queries.
        candidates: ``[C, D]`` embeddings of the candidates.
        right: for each query the indices of its right candidates, at least one.

    Returns:
        For each query the ranks of its right candidates, from 1, ascending.
    """
    queries = F.normalize(torch.as_tensor(np.asarray(source), dtype=torch.float32), dim=-1)
    documents = F.normalize(torch.as_tensor(np.asarray(candidates), dtype=torch.float32), dim=-1)
    documents, place = _distinct_rows(documents)
    ranks: list[NDArray[np.int64]] = []
    block = max(1, _COSINES // max(1, len(place)))
    for start in range(0, len(queries), block):
        with without_autocast(queries):
            cosines = (queries[start : start + block] @ documents.T).numpy()[:, place]  # [block, C]
        for row, indices in zip(cosines, right[start : start + block], strict=True):
            of_right = np.sort(np.nan_to_num(row[list(indices)], nan=-np.inf))[::-1]
            wrong = np.nan_to_num(np.delete(row, list(indices)), nan=np.inf)
            nearer = (wrong[None, :] >= of_right[:, None]).sum(1)
            ranks.append(nearer + np.arange(1, len(of_right) + 1))
    return ranks


def _distinct_rows(vectors: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Return the distinct rows of a matrix in the order of their first places, and for each row its index in them."""
    numbers: dict[bytes, int] = {}
    place = np.asarray([numbers.setdefault(row.tobytes(), len(numbers)) for row in vectors.numpy()], np.int64)
    first = np.unique(place, return_index=True)[1]
    return vectors[torch.from_numpy(first)], place


def metrics(ranks: Ranks) -> dict[str, NDArray[np.float64]]:
    """Compute each metric of ``output.RETRIEVAL_METRICS`` for every query, ``[Q]``.

    ``hits_at_k`` is 1 if a right candidate is among the first k; ``mrr`` the reciprocal rank of the first right one;
    ``ndcg_at_10`` the gain ``sum 1 / log2(1 + rank)`` of the right ones among the first ten, divided by the largest
    gain that they can have (Järvelin & Kekäläinen, 2002, with binary relevance).
    """
    first = np.asarray([record_ranks[0] for record_ranks in ranks], np.float64)
    gain = np.asarray([(1 / np.log2(1 + record_ranks[record_ranks <= CUTOFF])).sum() for record_ranks in ranks])
    ideal = np.cumsum(1 / np.log2(1 + np.arange(1, CUTOFF + 1)))
    largest = np.asarray([ideal[min(len(record_ranks), CUTOFF) - 1] for record_ranks in ranks])
    values = ((first <= 1), (first <= CUTOFF), 1 / first, gain / largest)
    return {name: np.asarray(value, np.float64) for name, value in zip(RETRIEVAL_METRICS, values, strict=True)}


def mean_over_queries(values: NDArray[np.float64], record: NDArray[np.int64], seed: int = 0) -> dict[str, float | None]:
    """Return the ``mean`` of the values ``[Q]``, and ``low`` and ``high`` of its 95 % interval.

    The interval is the percentile interval of :data:`RESAMPLES` bootstrap samples of the records, since the queries of
    one record are alike. Wilson's takes its place for a share of records with one query each, and for a share of 0 or
    1, whose bootstrap samples are all equal.

    Args:
        values: one for each query.
        record: ``[Q]`` index of the record of each query.
        seed: of the samples.
    """
    place = np.unique(record, return_inverse=True)[1]
    sums, counts = np.bincount(place, values), np.bincount(place)
    mean = float(values.mean())
    is_share = bool(np.isin(values, (0, 1)).all())
    if is_share and (counts.max() == 1 or mean in (0, 1)):
        return mean_with_interval([bool(total) for total in sums])
    generator = np.random.default_rng(seed)
    samples = (generator.integers(len(counts), size=len(counts)) for _ in range(RESAMPLES))
    means = [sums[sample].sum() / counts[sample].sum() for sample in samples]
    low, high = np.quantile(means, (0.025, 0.975))
    return {"mean": mean, "low": float(low), "high": float(high)}


# -- queries and candidates --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retrieval:
    """The result of ranking the distinct targets for every source.

    Attributes:
        record: ``[Q]`` index of the record of each query.
        ranks: for each query the ranks of its right candidates.
        candidates: number of distinct targets.
        config: the settings by which the views were read.
        of_text: the ranks if only equal texts are right; None if they are the same.
        without_pair: how many records are no queries since they have no pair, and why; None if all have one.
    """

    record: NDArray[np.int64]
    ranks: Ranks
    candidates: int
    config: JepaConfig
    of_text: Ranks | None = None
    without_pair: str | None = None

    def means(self) -> dict[str, float]:
        """Return the mean of each metric over the queries."""
        return {name: float(values.mean()) for name, values in metrics(self.ranks).items()}

    def summary(self) -> JsonObject:
        """Return ``queries``, ``candidates``, ``readout``; ``mean``, ``low`` and ``high`` of each metric.

        ``without_pair`` says how many records are no queries, and why; it is missing if all are. ``equal_text_only``
        has the means if an equal answer with another text counts as wrong; None if there is no such answer.
        """
        readout = {"views": self.config.mode, "layer": self.config.jepa_layer, "pooling": self.config.pooling}
        summary: JsonObject = {"queries": len(self.ranks), "candidates": self.candidates, "readout": readout}
        summary |= {} if self.without_pair is None else {"without_pair": self.without_pair}
        for name, values in metrics(self.ranks).items():
            summary[name] = mean_over_queries(values, self.record)
        of_text = None if self.of_text is None else metrics(self.of_text)
        summary["equal_text_only"] = of_text and {name: float(values.mean()) for name, values in of_text.items()}
        return summary

    def of_records(self, count: int) -> list[list[int]]:
        """Return, for each of ``count`` records, the rank of the first right candidate of each of its queries."""
        lists: list[list[int]] = [[] for _ in range(count)]
        for record, ranks in zip(self.record.tolist(), self.ranks, strict=True):
            lists[record].append(int(ranks[0]))
        return lists


def rank_targets(embeddings: ViewEmbeddings, names: Sequence[str | None], config: JepaConfig) -> Retrieval:
    """Rank the distinct targets of some pairs for each of their sources.

    Args:
        embeddings: of all pairs.
        names: for each record a name that records with equal answers share, see :func:`answer_names`; None if only
            equal texts are right. Used for records with one pair, whose target is the answer.
        config: the settings by which the views were read.
    """
    # Pairs whose targets are the same text share the embedding of the first.
    candidates, of_pair = np.unique(embeddings.same_target, return_inverse=True)
    pairs = np.bincount(embeddings.record)
    answers = [names[record] if pairs[record] == 1 else None for record in embeddings.record.tolist()]
    equal: dict[str, set[int]] = {}
    for name, candidate in zip(answers, of_pair.tolist(), strict=True):
        if name is not None:
            equal.setdefault(name, set()).add(candidate)
    texts = [[candidate] for candidate in of_pair.tolist()]
    right = [
        text if name is None else sorted(equal[name].union(text)) for name, text in zip(answers, texts, strict=True)
    ]
    documents = embeddings.target[candidates]
    ranks = ranks_of_right(embeddings.source, documents, right)
    of_text = None if right == texts else ranks_of_right(embeddings.source, documents, texts)
    return Retrieval(embeddings.record, ranks, len(candidates), config, of_text, embeddings.without_pair)


def answer_names(task: Task, records: Sequence[Record], config: JepaConfig) -> list[str | None]:
    """Return a name for each record's answer, equal for equal answers; None where the target is not the answer.

    Args:
        task: decides which answers are equal.
        records: those of the test file.
        config: of the readout; its mode and direction say whether a target is an answer.
    """
    if config.mode != "llm-jepa" or config.reverse_pred or any(record.views is not None for record in records):
        return [None] * len(records)
    return task.answer_names(records)
