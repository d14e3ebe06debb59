"""The numbers of an analysis against slow, obvious computations and against views whose relation is known."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from stepjepa.evaluation.embeddings import (
    ViewEmbeddings,
    embedding_metrics,
    linear_map_errors,
    similarity_quantiles,
    singular_values,
)


def views(source: Any, target: Any, record: Any = None) -> ViewEmbeddings:
    count = len(source)
    record = np.arange(count) if record is None else np.asarray(record)
    return ViewEmbeddings(
        *(np.asarray(side, np.float32) for side in (source, target)),
        record,
        np.ones(count, np.int64),
        np.arange(count),
    )


def random_views(count: int, size: int, seed: int = 0, noise: float = 1.0) -> ViewEmbeddings:
    """Targets that are a linear map of the sources, and some noise."""
    generator = np.random.default_rng(seed)
    source = generator.normal(size=(count, size))
    return views(source, source @ generator.normal(size=(size, size)) + noise * generator.normal(size=(count, size)))


def cosine(first: Any, second: Any) -> float:
    dot = sum(float(a) * float(b) for a, b in zip(first, second, strict=True))
    return dot / math.sqrt(sum(float(a) ** 2 for a in first) * sum(float(b) ** 2 for b in second))


def test_cosines_are_those_of_a_slow_loop() -> None:
    embeddings = random_views(13, 5)
    numbers = embedding_metrics(embeddings)
    table = [[cosine(a, b) for b in embeddings.target] for a in embeddings.source]
    matched = [table[i][i] for i in range(13)]
    shuffled = [table[i][j] for i, j in itertools.permutations(range(13), 2)]
    for kind, values in (("matched", matched), ("shuffled", shuffled)):
        assert numbers[kind]["n"] == len(values)
        assert numbers[kind]["mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert numbers["matched"]["std"] == pytest.approx(np.std(matched), abs=1e-6)
    for share in (0.1, 0.2, 0.5, 0.8, 0.9):
        assert numbers["matched"]["quantiles"][str(share)] == pytest.approx(np.quantile(matched, share), abs=1e-6)
    nearest = [max(range(13), key=lambda j: row[j]) for row in table]
    assert numbers["retrieval_top1"] == pytest.approx(np.mean([i == j for i, j in enumerate(nearest)]))
    assert (numbers["pairs"], numbers["records"], numbers["dimensions"]) == (13, 13, 5)


@pytest.mark.parametrize(("count", "size"), [(40, 7), (5, 9)])
def test_singular_values_are_roots_of_the_eigenvalues_of_the_gram_matrix(count: int, size: int) -> None:
    embeddings = random_views(count, size)
    result = embedding_metrics(embeddings)
    source, target = embeddings.source.astype(np.float64), embeddings.target.astype(np.float64)
    matrix = source - target
    expected = np.sqrt(np.maximum(np.linalg.eigvalsh(matrix.T @ matrix)[::-1], 0))[: min(count, size)]
    assert result["difference"]["values"] == pytest.approx(expected, rel=1e-4)
    assert result["difference"]["top"] == min(count, size)
    assert result["difference"]["top_mean"] == pytest.approx(expected.mean(), rel=1e-4)


def test_only_the_largest_hundred_are_averaged() -> None:
    result = singular_values(np.diag(np.arange(1.0, 131.0)))
    assert (result["top"], len(result["values"]), result["values"][0]) == (100, 130, pytest.approx(130))
    assert result["top_mean"] == pytest.approx(np.mean(np.arange(31, 131)))


def test_the_error_of_the_map_is_that_of_the_normal_equations() -> None:
    embeddings = random_views(50, 4, noise=2.0)
    x, y = embeddings.source.astype(np.float64), embeddings.target.astype(np.float64)
    result = linear_map_errors(embeddings)
    weights = np.linalg.inv(x.T @ x) @ x.T @ y
    assert result["error"] == pytest.approx(np.linalg.norm(x @ weights - y), rel=1e-6)


def test_a_linear_map_is_found_and_an_intercept_is_no_error() -> None:
    embeddings = random_views(200, 4, noise=0.0)
    result, moved = (linear_map_errors(views(embeddings.source, embeddings.target + shift)) for shift in (0, 50))
    assert result["error"] < 1e-3 and moved["error"] > 100
    assert result["held_out"] < 1e-6 and moved["held_out"] < 1e-6


def test_unrelated_views_are_told_from_too_few_of_them() -> None:
    generator = np.random.default_rng(3)
    many, few = (views(*generator.normal(size=(2, count, 20))) for count in (2000, 18))
    numbers = embedding_metrics(many)
    assert numbers["linear_map"]["held_out"] == pytest.approx(1 + 20 / 1000, abs=0.02)
    assert numbers["notes"] == []
    numbers = embedding_metrics(few)
    assert numbers["linear_map"]["error"] < 1e-3
    assert numbers["linear_map"]["held_out"] > 1
    assert numbers["notes"][0].startswith("18 pairs in 20 dimensions are too few")


def test_pairs_of_one_record_are_never_on_both_sides() -> None:
    # Every record has a target of its own, given away by the source to whoever has seen another pair of the record.
    generator = np.random.default_rng(0)
    records = np.repeat(np.arange(20), 10)
    source = np.eye(20)[records] + 1e-3 * generator.normal(size=(200, 20))
    target = generator.normal(size=(20, 20))[records]
    shuffled = generator.permutation(200)
    assert (
        linear_map_errors(views(source[shuffled], target[shuffled]))["held_out"] < 0.1
    )  # as if each pair were a record
    assert linear_map_errors(views(source, target, records))["held_out"] > 0.9


def test_what_can_not_be_measured_is_none() -> None:
    one = embedding_metrics(views([[1.0, 2.0]], [[2.0, 1.0]]))
    assert one["shuffled"] == {"n": 0}
    assert one["matched"]["mean"] == pytest.approx(0.8)
    assert one["linear_map"] == {"error": pytest.approx(0, abs=1e-6), "held_out": None}
    assert "source_rank" not in one
    same = embedding_metrics(views(np.random.default_rng(0).normal(size=(9, 2)), np.ones((9, 2))))
    assert same["linear_map"]["held_out"] is None
    assert similarity_quantiles([None]) == similarity_quantiles([]) == {"n": 0}


def test_rounding_is_no_direction() -> None:
    # Two directions in a hundred dimensions, the others no more than rounding, which a map must not be fitted to.
    generator = np.random.default_rng(0)
    inner = generator.normal(size=(220, 2))
    source = inner @ generator.normal(size=(2, 100)) + 1e-7 * generator.normal(size=(220, 100))
    target = inner @ generator.normal(size=(2, 100)) + generator.normal(size=(220, 100))
    numbers = linear_map_errors(views(source, target))
    assert numbers["held_out"] == pytest.approx(1 / 3, abs=0.08)
    assert linear_map_errors(views(np.ones((400, 3)), generator.normal(size=(400, 3))))["held_out"] == pytest.approx(
        1, abs=0.02
    )


def test_a_collapse_is_said() -> None:
    near = 1 + 1e-3 * np.random.default_rng(0).normal(size=(2, 400, 4))
    numbers = embedding_metrics(views(*near))
    assert numbers["notes"] == ["unrelated pairs are as alike as related ones: the embeddings are one direction"]
    assert numbers["source_rank"] < 1.1
