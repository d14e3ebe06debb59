"""A linear map from source to target embeddings, fitted on known pairs by ridge regression.

Retrieval behind such a map is the baseline of trained embeddings: it costs no training of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.counting import counted
from stepjepa.objectives.view_embeddings import ReadoutPlace, ViewEmbeddings
from stepjepa.views.sequences import Kind

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

    def __call__(self, vectors: _Embeddings, side: Kind) -> _Embeddings:
        """Return the predictions of sources ``[N, D]``, or targets ``[N, D]``, both less the mean target, in float32.

        A regression predicts the mean target where it knows nothing; left in, all predictions would point that way.
        ValueError for vectors with other dimensions than those that the map was fitted on.
        """
        if vectors.shape[1] != len(self.source_mean):
            expected = f"[N, {len(self.source_mean)}] as the map was fitted on"
            raise ValueError(f"vectors: expected {expected}, got {[*vectors.shape]}; fit a map for this model")
        if side == "source":
            mapped: _Embeddings = ((vectors - self.source_mean) @ self.weight).astype(np.float32)
        else:
            mapped = (vectors - self.target_mean).astype(np.float32)
        return mapped

    def of_pairs(self, pairs: ViewEmbeddings) -> ViewEmbeddings:
        """Return the pairs with their sources and targets as the map gives them."""
        return replace(pairs, source=self(pairs.source, "source"), target=self(pairs.target, "target"))


@dataclass(frozen=True, eq=False)
class FittedMap:
    """A linear map that was fitted on the pairs of some records, and the embeddings that it belongs to.

    Attributes:
        linear_map: the map.
        place: where the embeddings in front of it are read.
        penalty: of the regression, one of :data:`PENALTIES`.
        records: number of records that it was fitted on.
        system_prompts: their most frequent system prompts; None stands for records without one.
    """

    linear_map: LinearMap
    place: ReadoutPlace
    penalty: float
    records: int
    system_prompts: Sequence[str | None] = ()

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the vectors behind the map depend on, but for the model."""
        digest = hashlib.sha256(f"{self.place} {self.system_prompts}".encode())
        for values in (self.linear_map.weight, self.linear_map.source_mean, self.linear_map.target_mean):
            digest.update(values.tobytes())
        return digest.hexdigest()

    def describe(self, file: str) -> str:
        """Describe the map for a user who named the file of its records."""
        layer, pooling = self.place
        readout = f"layer {layer}, pooling {pooling}, penalty {self.penalty:g}"
        return f"the linear map is fitted on {counted(self.records, 'record')} of {file}: {readout}"

    def __repr__(self) -> str:
        layer, pooling = self.place
        records = counted(self.records, "record")
        return f"FittedMap({records}, layer {layer}, pooling {pooling}, penalty {self.penalty:g})"


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
