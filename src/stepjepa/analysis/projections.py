"""Vectors to the plane: PCA, t-SNE, UMAP."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.errors import UserError

PROJECTIONS = ("pca", "tsne", "umap")

_FEWEST = {"pca": 2, "tsne": 4, "umap": 5}
_ROUNDING = 1e-5
"""Spread of points, relative to their length, below which they count as one point."""


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


def project(name: str, vectors: NDArray[np.float32], seed: int) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Points in the plane.

    Args:
        name: one of :data:`PROJECTIONS`.
        vectors: ``[M, D]``, of one model.
        seed: of t-SNE and UMAP.

    Returns:
        ``[M, 2]``, and what a caption should say: ``variance`` (shares of the two axes) of PCA, ``perplexity`` of
        t-SNE, ``neighbours`` of UMAP. Points that differ by rounding alone are one point in the plane too, since any
        projection would blow the rounding up to a picture; the caption is empty then.

    Raises:
        UserError: there are too few points.
    """
    count = len(vectors)
    if count < _FEWEST[name]:
        remedy = "take more records" if name == "pca" else "take more records, or pass --projections pca"
        raise UserError(f"{name} needs {_FEWEST[name]} points or more, and there are {count}; {remedy}")
    wide = vectors.astype(np.float64)
    if np.linalg.norm(wide - wide.mean(0)) <= _ROUNDING * np.linalg.norm(wide):
        return np.zeros((count, 2)), {}
    if name == "pca":
        from sklearn.decomposition import PCA

        pca = PCA(n_components=2, svd_solver="full")
        return pca.fit_transform(wide), {"variance": pca.explained_variance_ratio_.tolist()}
    if name == "tsne":
        from sklearn.manifold import TSNE

        perplexity = min(30.0, (count - 1) / 3)
        plane = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(wide)
        return plane.astype(np.float64), {"perplexity": perplexity}
    from umap import UMAP

    neighbours = min(15, count - 1)
    plane = UMAP(n_components=2, n_neighbors=neighbours, random_state=seed).fit_transform(wide)
    return np.asarray(plane, np.float64), {"neighbours": neighbours}
