"""Exact search among embedded texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepjepa.base.arguments import check_number
from stepjepa.base.counting import counted
from stepjepa.objectives.inputs import EmbedOptions, Inputs, Text, as_inputs
from stepjepa.objectives.precision import without_autocast
from stepjepa.views.sequences import Kind

BLOCK = 2**16
"""Vectors that are compared with the queries at once."""


class Embeds(Protocol):
    """The part of ``Jepa`` that :class:`TextIndex` uses."""

    def embed(self, inputs: Inputs, side: Kind = ..., **options: Unpack[EmbedOptions]) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """One result of a search.

    Attributes:
        score: cosine of query and text.
        text: the text that was found.
        index: index in the corpus, of the first of equal texts.
    """

    score: float
    text: str
    index: int


@dataclass(frozen=True, eq=False)
class TextIndex:
    """Distinct texts with their vectors, to be searched by queries of the other side; made by ``Jepa.index``.

    Attributes:
        jepa: embeds the queries.
        texts: the N distinct texts.
        first: ``[N]`` index in the corpus of the first text that is equal to each.
        vectors: ``[N, D]`` float32, of length 1.
        side: of the texts; queries are embedded on the other one.
        options: by which texts and queries are embedded.
    """

    jepa: Embeds
    texts: Sequence[str]
    first: NDArray[np.int64]
    vectors: NDArray[np.float32]
    side: Kind = "target"
    options: EmbedOptions | None = None

    def __repr__(self) -> str:
        texts, dimensions = counted(len(self.texts), "text"), counted(self.vectors.shape[1], "dimension")
        return f"TextIndex({texts}, {dimensions}, side {self.side})"

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def of(cls, jepa: Embeds, texts: Inputs, side: Kind = "target", **options: Unpack[EmbedOptions]) -> TextIndex:
        """Embed a corpus, see ``Jepa.index``.

        Args:
            jepa: embeds texts.
            texts: the corpus; equal texts are one entry.
            side: the side of the corpus.
            options: of ``Jepa.embedder``.

        Raises:
            ValueError: ``texts`` are records, or ``raw`` is set: a search compares by cosine.
        """
        if options.get("raw"):
            raise ValueError("raw: an index compares by cosine, so its vectors have length 1; leave raw out")
        chosen, first = distinct(texts)
        return cls(jepa, [text.text for text in chosen], first, jepa.embed(chosen, side, **options), side, options)

    def search(self, queries: Inputs, k: int = 10) -> list[list[Hit]]:
        """Find the texts nearest to each query.

        Args:
            queries: texts, or records; one list of hits for each row of their embeddings.
            k: most hits of a query.

        Returns:
            Hits of each query by falling cosine, equal ones in the corpus' order.

        Raises:
            ValueError: ``queries`` is a single text, or ``k`` is below 1.
            TypeError: ``k`` is no whole number.
            UserError: a query can't be embedded, see ``Jepa.embed``.
        """
        side: Kind = "source" if self.side == "target" else "target"
        scores, indices = nearest(self.jepa.embed(queries, side, **(self.options or {})), self.vectors, k)
        return [
            [Hit(score, self.texts[index], int(self.first[index])) for score, index in zip(*row, strict=True)]
            for row in zip(scores.tolist(), indices.tolist(), strict=True)
        ]


def distinct(texts: Inputs) -> tuple[list[Text], NDArray[np.int64]]:
    """Return the distinct texts of a corpus, in the order of their first places, and the indices of these places.

    ValueError if the corpus is of records.
    """
    places: dict[str, tuple[int, Text]] = {}
    for number, value in enumerate(as_inputs(texts, open_chats=False)):
        if not isinstance(value, Text):
            raise ValueError("texts: expected a list of texts to be found, got records")
        places.setdefault(value.text, (number, value))
    return [text for _, text in places.values()], np.array([number for number, _ in places.values()], np.int64)


def nearest(
    queries: NDArray[np.float32], vectors: NDArray[np.float32], k: int, *, block: int = BLOCK
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Find the ``k`` largest inner products of each query, exactly, by blocks of ``vectors``.

    Args:
        queries: ``[Q, D]``.
        vectors: ``[N, D]``.
        k: number of results; all N if there are fewer.
        block: vectors at a time.

    Returns:
        ``[Q, k]`` inner products, falling, and ``[Q, k]`` indices into ``vectors``; equal products by index.

    Raises:
        ValueError: ``k`` is below 1.
        TypeError: ``k`` is no whole number.
    """
    check_number("k", k)
    best = torch.empty((len(queries), 0))
    indices = torch.empty((len(queries), 0), dtype=torch.int64)
    for start in range(0, len(vectors), block):
        with without_autocast(best):
            scores = torch.from_numpy(queries) @ torch.from_numpy(vectors[start : start + block]).T
        block_best, places = _largest(scores, min(k, scores.shape[1]))
        best, indices = torch.cat([best, block_best], 1), torch.cat([indices, places + start], 1)
        # By score, equal ones by index: sort by index, then stably by score.
        indices, by_index = indices.sort(dim=1)
        best, by_score = best.gather(1, by_index).sort(dim=1, descending=True, stable=True)
        best, indices = best[:, :k], indices.gather(1, by_score)[:, :k]
    return best.numpy(), indices.numpy()


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest scores of each row of ``[Q, N]`` and their columns, the first of equal ones."""
    values, places = scores.topk(k, dim=1)
    # Of scores that equal the smallest of these, topk takes any. Sorting whole rows is slow, so only such rows are.
    undecided = ((scores >= values[:, -1:]).sum(1) > k).nonzero()[:, 0]
    if len(undecided):
        ordered = scores[undecided].sort(dim=1, descending=True, stable=True)
        values[undecided], places[undecided] = ordered.values[:, :k], ordered.indices[:, :k]
    return values, places
