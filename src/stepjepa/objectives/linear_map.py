"""A linear map of source and target embeddings to where partners are near, fitted on known pairs.

Retrieval behind such a map is the baseline of trained embeddings: it costs no training of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stepjepa.views.sequences import Kind


class Fit(NamedTuple):
    """How a map is fitted: ``ridge`` regression of targets on sources, or ``canonical`` correlations of both.

    The penalty is relative to the mean squared singular value of the centred embeddings.
    """

    method: Literal["ridge", "canonical"]
    penalty: float


FITS = (
    *(Fit("ridge", penalty) for penalty in (1e-6, 1e-4, 1e-2, 1.0)),
    *(Fit("canonical", penalty) for penalty in (1e-4, 1e-2, 1e-1, 1.0)),
)
"""The fits that are tried."""

_Matrix = NDArray[np.float64]
_Embeddings = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """An affine map of source embeddings, and one of target embeddings.

    Attributes:
        weight: ``[D, D]``, of a centred source.
        source_mean: ``[D]`` mean of the sources that it was fitted on.
        target_mean: ``[D]`` mean of their targets.
        target_weight: ``[D, D]``, of a centred target; None leaves targets as they are but for their mean.
    """

    weight: _Matrix
    source_mean: _Matrix
    target_mean: _Matrix
    target_weight: _Matrix | None = None

    @property
    def dimensions(self) -> int:
        """D."""
        return len(self.source_mean)

    def __call__(self, vectors: _Embeddings, side: Kind) -> _Embeddings:
        """Return sources or targets ``[N, D]`` behind the map, in float32: those of a pair are near each other.

        A regression predicts the mean target where it knows nothing; left in, all predictions would point that way.
        """
        source = side == "source"
        centred = vectors - (self.source_mean if source else self.target_mean)
        weight = self.weight if source else self.target_weight
        mapped: _Embeddings = (centred if weight is None else centred @ weight).astype(np.float32)
        return mapped

    def arrays(self) -> dict[str, _Matrix]:
        """Return the arguments that make the same map."""
        return {name: values for name, values in vars(self).items() if values is not None}


def fit_linear_maps(sources: _Embeddings, targets: _Embeddings, fits: Sequence[Fit] = FITS) -> Iterator[LinearMap]:
    """Fit maps on known pairs in float64, one for each fit; only one at a time is made, since they may be large.

    Args:
        sources: ``[N, D]`` embeddings of known sources.
        targets: ``[N, D]`` embeddings of their targets.
        fits: methods and penalties.
    """
    source, target = _Side.of(sources), _Side.of(targets)
    for fit in fits:
        yield (_ridge if fit.method == "ridge" else _canonical)(source, target, fit.penalty)


class _Side(NamedTuple):
    """The embeddings of one side: their mean ``[D]``, and the singular value decomposition of the centred ones."""

    mean: _Matrix
    left: _Matrix  # [N, M], M the smaller one of N and D
    singular: _Matrix  # [M]
    right: _Matrix  # [M, D]

    @classmethod
    def of(cls, vectors: _Embeddings) -> Self:
        values = vectors.astype(np.float64)
        mean = values.mean(0)
        return cls(mean, *np.linalg.svd(values - mean, full_matrices=False))

    def damped(self, penalty: float) -> _Matrix:
        """Return the squares of the singular values ``[M]`` and the penalty times their mean over dimensions."""
        squares = self.singular**2
        damped: _Matrix = squares + penalty * squares.sum() / len(self.mean)
        return damped


def _ridge(source: _Side, target: _Side, penalty: float) -> LinearMap:
    """Fit a map of sources alone by ridge regression (Hoerl & Kennard, 1970).

    ``W = argmin |X W - Y|^2 + penalty * s * |W|^2`` of centred sources ``X`` and targets ``Y``, ``[N, D]``. The scale
    ``s`` is the mean over dimensions of the sum of squares of ``X``.
    """
    # Sources that are all equal predict the mean target.
    factors = _ratio(source.singular, source.damped(penalty))
    predicted = source.left.T @ (target.left * target.singular) @ target.right
    return LinearMap(source.right.T @ (factors[:, None] * predicted), source.mean, target.mean)


def _canonical(source: _Side, target: _Side, penalty: float) -> LinearMap:
    """Fit maps of both sides by canonical correlations (Hotelling, 1936) with a ridge (Vinod, 1976).

    Both sides are whitened by ``(X^T X + penalty * s * I)^(-1/2)``, with ``s`` as for :func:`_ridge`, and turned to the
    directions ``U`` and ``V`` that correlate, of the singular value decomposition ``U C V^T`` of the whitened
    ``X^T Y``. Each direction counts by its correlation in ``C``.
    """
    whitening = [_ratio(np.ones_like(side.singular), np.sqrt(side.damped(penalty))) for side in (source, target)]
    one, other = (side.left * side.singular * scale for side, scale in zip((source, target), whitening, strict=True))
    turned, correlations, back = np.linalg.svd(one.T @ other, full_matrices=False)
    weights = []
    for side, scale, directions in zip((source, target), whitening, (turned, back.T), strict=True):
        weight = np.zeros((len(side.mean), len(side.mean)))
        weight[:, : len(correlations)] = side.right.T @ (scale[:, None] * directions * correlations)
        weights.append(weight)
    return LinearMap(weights[0], source.mean, target.mean, weights[1])


def _ratio(values: _Matrix, divisors: _Matrix) -> _Matrix:
    """Divide; 0 where the divisor is 0."""
    ratio: _Matrix = np.divide(values, divisors, out=np.zeros_like(values), where=divisors > 0)
    return ratio
