"""Vectors to the plane: PCA, t-SNE, UMAP."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.errors import UserError

PROJECTIONS = ("pca", "tsne", "umap")

ROUNDING = 1e-5
"""Spread of points, relative to their length, below which they count as one point."""

Plane = NDArray[np.float64]


def check_projections(names: Sequence[str]) -> None:
    """Refuse a projection whose library is missing, before anything is computed.

    Raises:
        UserError: umap is asked for and not installed.
    """
    if "umap" in names and importlib.util.find_spec("umap") is None:
        raise UserError(
            "--projections umap needs umap-learn, which is not installed; leave umap out or run "
            "'pip install umap-learn'"
        )


def project(name: str, vectors: NDArray[np.float32], seed: int) -> tuple[Plane, dict[str, Any]]:
    """Points in the plane.

    Args:
        name: one of :data:`PROJECTIONS`.
        vectors: ``[M, D]``, of one model.
        seed: of t-SNE and UMAP.

    Returns:
        ``[M, 2]``, and what a caption should say: ``variance`` (shares of the two axes) of PCA, ``perplexity`` of
        t-SNE, ``neighbours`` of UMAP. Points that are one point but for rounding are one point in the plane too: any
        projection would blow the rounding up to a picture. The caption is empty then.

    Raises:
        UserError: there are too few points.
    """
    fewest = {"pca": 2, "tsne": 4, "umap": 5}[name]
    if len(vectors) < fewest:
        remedy = "take more records" if name == "pca" else "take more records, or pass --projections pca"
        raise UserError(f"{name} needs {fewest} points or more, and there are {len(vectors)}; {remedy}")
    wide = vectors.astype(np.float64)
    if np.linalg.norm(wide - wide.mean(0)) <= ROUNDING * np.linalg.norm(wide):
        return np.zeros((len(wide), 2)), {}
    return {"pca": _pca, "tsne": _tsne, "umap": _umap}[name](wide, seed)


def _pca(vectors: NDArray[np.float64], _seed: int) -> tuple[Plane, dict[str, Any]]:
    centred = vectors - vectors.mean(0)
    left, values, right = np.linalg.svd(centred, full_matrices=False)
    # The sign of a component means nothing; with this rule it is the same whatever library computed it.
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(1)])[:2]
    plane = np.zeros((len(vectors), 2))
    plane[:, : len(signs)] = left[:, :2] * values[:2] * signs
    shares = values**2 / (values**2).sum()
    return plane, {"variance": [float(share) for share in (*shares, 0.0)[:2]]}


def _tsne(vectors: NDArray[np.float64], seed: int) -> tuple[Plane, dict[str, Any]]:
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(vectors) - 1) / 3)
    plane = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(vectors)
    return plane.astype(np.float64), {"perplexity": perplexity}


def _umap(vectors: NDArray[np.float64], seed: int) -> tuple[Plane, dict[str, Any]]:
    from umap import UMAP

    neighbours = min(15, len(vectors) - 1)
    plane = UMAP(n_components=2, n_neighbors=neighbours, random_state=seed).fit_transform(vectors)
    return np.asarray(plane, np.float64), {"neighbours": neighbours}
