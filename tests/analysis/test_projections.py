"""From many dimensions to two."""

import numpy as np
import pytest

from stepjepa.analysis.points import project
from stepjepa.errors import UserError


def points(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, 7)).astype(np.float32)


def test_pca_is_that_of_a_singular_value_decomposition() -> None:
    vectors = points(41)
    plane, caption = project("pca", vectors, 0)
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    _, values, right = np.linalg.svd(centred)
    assert np.abs(plane) == pytest.approx(np.abs(centred @ right[:2].T), abs=1e-6)
    assert caption["variance"] == pytest.approx(values[:2] ** 2 / (values**2).sum(), abs=1e-6)
    assert np.array_equal(project("pca", vectors, 5)[0], plane), "no seed"


def test_tsne_depends_on_the_seed_alone() -> None:
    vectors = points(30)
    first, caption = project("tsne", vectors, 3)
    assert np.array_equal(first, project("tsne", vectors, 3)[0])
    assert caption == {"perplexity": 29 / 3}
    few, caption = project("tsne", vectors[:4], 3)
    assert np.isfinite(few).all() and caption == {"perplexity": 1}


@pytest.mark.parametrize("name", ["pca", "tsne"])
def test_rounding_is_not_blown_up_to_a_picture(name: str) -> None:
    generator = np.random.default_rng(0)
    vectors = (7 + 1e-6 * generator.normal(size=(50, 8))).astype(np.float32)
    plane, caption = project(name, vectors, 0)
    assert not plane.any()
    assert caption == {}
    # A collapse that is more than rounding is drawn as it is.
    assert project(name, (7 + 1e-2 * generator.normal(size=(50, 8))).astype(np.float32), 0)[0].any()


@pytest.mark.parametrize(("name", "count"), [("pca", 1), ("tsne", 3)])
def test_too_few_points(name: str, count: int) -> None:
    with pytest.raises(UserError, match=f"{name} needs {count + 1} points or more, and there are {count}; take more"):
        project(name, np.eye(5, dtype=np.float32)[:count], 0)
