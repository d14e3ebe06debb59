"""A linear map from source to target embeddings, fitted on known pairs by ridge regression.

Retrieval behind such a map is the baseline of trained embeddings: it costs no training of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepjepa.objectives.reading import ViewEmbeddings

PENALTIES = (1e-6, 1e-4, 1e-2, 1.0)
"""Penalties of the regression that are tried, relative to the mean squared singular value of the centred sources."""

_Matrix = NDArray[np.float64]
_Embeddings = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """An affine map from source to target embeddings.

    Attributes:
        weight: ``[D, D]``, from a centred source to a centred target.
        source_mean: ``[D]`` mean of the sources that it was fitted on.
        target_mean: ``[D]`` mean of their targets.
    """

    weight: _Matrix
    source_mean: _Matrix
    target_mean: _Matrix

    def __call__(self, source: _Embeddings, target: _Embeddings) -> tuple[_Embeddings, _Embeddings]:
        """Return predictions from sources ``[N, D]``, and targets ``[N, D]``, both less the mean target, in float32.

        A regression predicts the mean target where it knows nothing; left in, all predictions would point that way.
        """
        predicted = (source - self.source_mean) @ self.weight
        return predicted.astype(np.float32), (target - self.target_mean).astype(np.float32)

    def of_pairs(self, pairs: ViewEmbeddings) -> ViewEmbeddings:
        """Return the pairs with their sources and targets as the map gives them."""
        source, target = self(pairs.source, pairs.target)
        return replace(pairs, source=source, target=target)


def fit_linear_maps(
    sources: _Embeddings, targets: _Embeddings, penalties: Sequence[float] = PENALTIES
) -> list[LinearMap]:
    """Fit maps by ridge regression (Hoerl & Kennard, 1970), one for each penalty.

    ``W = argmin |X W - Y|^2 + penalty * s * |W|^2`` of centred sources ``X`` and targets ``Y``, ``[N, D]``, in float64.
    The scale ``s`` is the mean over dimensions of the sum of squares of ``X``.

    Args:
        sources: ``[N, D]`` embeddings of known sources.
        targets: ``[N, D]`` embeddings of their targets.
        penalties: relative to that scale.
    """
    source, target = sources.astype(np.float64), targets.astype(np.float64)
    means = source.mean(0), target.mean(0)
    left, singular, right = np.linalg.svd(source - means[0], full_matrices=False)
    projected = left.T @ (target - means[1])
    scale = float((singular**2).sum()) / source.shape[1]
    maps = []
    for penalty in penalties:
        damped = singular**2 + penalty * scale
        # Sources that are all equal predict the mean target.
        factors = np.divide(singular, damped, out=np.zeros_like(singular), where=damped > 0)
        maps.append(LinearMap(right.T @ (factors[:, None] * projected), *means))
    return maps
