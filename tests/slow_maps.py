"""Linear maps fitted by the textbook: scikit-learn's ridge regression, and canonical correlations by eigenvectors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from stepjepa.objectives.linear_map import Fit


class SlowMap(NamedTuple):
    """Sources and targets behind a map that was fitted on known pairs."""

    source: NDArray[Any]
    target: NDArray[Any]


def slow_map(fit: Fit, known: Any, new_source: Any, new_target: Any) -> SlowMap:
    """Map new embeddings by a fit on known pairs, which have ``source`` and ``target`` ``[N, D]``.

    The directions of canonical correlations have no sign of their own; see :func:`same_signs`.
    """
    x, y = known.source.astype(np.float64), known.target.astype(np.float64)
    means = x.mean(0), y.mean(0)
    x, y = x - means[0], y - means[1]
    if fit.method == "ridge":
        ridge = Ridge(alpha=fit.penalty * float((x**2).sum(0).mean())).fit(x, y)
        return SlowMap(ridge.predict(new_source - means[0]), new_target - means[1])
    one, other = _whitening(x, fit.penalty), _whitening(y, fit.penalty)
    turned, correlations, back = np.linalg.svd(one @ x.T @ y @ other)
    weights = one @ turned * correlations, other @ back.T * correlations
    return SlowMap((new_source - means[0]) @ weights[0], (new_target - means[1]) @ weights[1])


def same_signs(values: Any, like: Any) -> NDArray[Any]:
    """Give each column the sign of that of another array."""
    signed: NDArray[Any] = values * np.sign((values * like).sum(0))
    return signed


def _whitening(values: NDArray[Any], penalty: float) -> NDArray[Any]:
    scatter = values.T @ values
    squares, directions = np.linalg.eigh(scatter + penalty * np.trace(scatter) / len(scatter) * np.eye(len(scatter)))
    whitening: NDArray[Any] = directions @ np.diag(squares**-0.5) @ directions.T
    return whitening
