"""Which embeddings become points of a picture, where in the plane, and in which colour."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.data.records import Record
from stepjepa.errors import UserError

if TYPE_CHECKING:
    from stepjepa.analysis.representations import ViewEmbeddings

PROJECTIONS = ("pca", "tsne")
COLOURINGS = ("in_n_out", "paraphrase", "rotten_tomatoes", "steps")
BOTH_VIEWS = ("in_n_out", "steps")
"""Colourings of both views; the others are of the text alone, whose partner often says the label outright."""

MOST_CLASSES = 7
"""Labels that have a colour of their own: more can't be told apart."""

NEXT_STEP = "next step"

_FEWEST = {"pca": 2, "tsne": 4}
_ROUNDING = 1e-5
"""Spread of points, relative to their length, below which they count as one point."""


class Points(NamedTuple):
    """Embeddings to be drawn."""

    vectors: NDArray[np.float32]  # [M, D]
    is_target: NDArray[np.bool_]  # [M], whether a point is the target view of its pair
    labels: tuple[str, ...]  # [M], what colours it


def sampled(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """Which of ``count`` things are taken: all, or a sample of ``most``, the same for the same numbers; ascending."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))


def choose_points(
    embeddings: ViewEmbeddings,
    colouring: str,
    records: Sequence[Record],
    *,
    views: tuple[str, str],
    most: int = 1000,
    seed: int = 0,
) -> Points:
    """The points of one model.

    Args:
        embeddings: of the records.
        colouring: one of :data:`COLOURINGS`.
        records: those that were embedded.
        views: names of source and target, see :func:`view_names`.
        most: pairs at most.
        seed: of the sample of pairs.

    Raises:
        UserError: a record lacks what colours it.
    """
    pairs = sampled(len(embeddings), most, seed)
    if colouring in BOTH_VIEWS:
        chosen, is_target = np.concatenate([pairs, pairs]), np.arange(2 * len(pairs)) >= len(pairs)
    else:
        chosen, is_target = pairs, np.full(len(pairs), views[1] == "text")
    vectors = np.where(is_target[:, None], embeddings.target[chosen], embeddings.source[chosen])

    def label(index: int, pair: int, view: str) -> str:
        if colouring == "in_n_out":
            return view
        if colouring == "steps":
            return f"step {pair + (view == NEXT_STEP)}"
        if colouring == "paraphrase":
            return f"group {group_of(records[index])}"
        # Whole, however long: answers that begin alike are different ones.
        return " ".join(records[index].answer.split())

    drawn = zip(embeddings.record[chosen].tolist(), embeddings.pair[chosen].tolist(), is_target.tolist(), strict=True)
    return Points(vectors, is_target, tuple(label(index, pair, views[target]) for index, pair, target in drawn))


def project(name: str, vectors: NDArray[np.float32], seed: int) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Points in the plane, by ``pca`` or ``tsne``.

    Returns:
        ``[M, 2]``, and what a caption should say: ``variance`` (shares of the two axes) of PCA, ``perplexity`` of
        t-SNE. Points that differ by rounding alone are one point in the plane too, with an empty caption.

    Raises:
        UserError: there are too few points.
    """
    count, fewest = len(vectors), _FEWEST[name]
    if count < fewest:
        raise UserError(
            f"{name} needs {fewest} points or more, and there are {count}; take more records, or pass --projections pca"
        )
    wide = vectors.astype(np.float64)
    if np.linalg.norm(wide - wide.mean(0)) <= _ROUNDING * np.linalg.norm(wide):
        return np.zeros((count, 2)), {}
    if name == "pca":
        from sklearn.decomposition import PCA

        pca = PCA(n_components=2, svd_solver="full")
        return pca.fit_transform(wide), {"variance": pca.explained_variance_ratio_.tolist()}
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (count - 1) / 3)
    plane = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(wide)
    return plane.astype(np.float64), {"perplexity": perplexity}


def view_names(mode: str, reverse_pred: bool) -> tuple[str, str]:
    """What source and target are called in ``llm-jepa`` or ``step-jepa``."""
    first, second = ("text", "code") if mode == "llm-jepa" else ("step", NEXT_STEP)
    return (second, first) if reverse_pred else (first, second)


def group_of(record: Record) -> str:
    """The group of paraphrases that a record belongs to.

    Raises:
        UserError: it says none.
    """
    value = record.extra.get("group")
    if value is None or isinstance(value, (list, dict, bool)):
        raise UserError(
            "no field 'group' with a name or a number, which --t_sne_type paraphrase needs; "
            "'stepjepa prepare paraphrase' writes it",
            path=record.path,
            line=record.line,
        )
    return str(value)


def choose_classes(labels: Sequence[str], colouring: str) -> list[str]:
    """The labels that get a colour of their own, in the order of the legend.

    Args:
        labels: of all points of all models.
        colouring: one of :data:`COLOURINGS`.
    """
    if colouring == "in_n_out":
        return list(dict.fromkeys(labels))
    if colouring == "steps":
        return sorted(set(labels), key=_natural_order)[:MOST_CLASSES]
    counts = Counter(labels)
    most = sorted(counts, key=lambda label: (-counts[label], label))[:MOST_CLASSES]
    return sorted(most, key=_natural_order)


def _natural_order(label: str) -> list[str | int]:
    """``group 2`` before ``group 10``; text and numbers take turns."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]{1,18})", label))]
