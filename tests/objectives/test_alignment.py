"""Terms on pairs of embeddings: values worked out by hand, and what they push towards."""

from __future__ import annotations

import math

import pytest
import torch

from stepjepa.objectives.alignment import (
    L2,
    MSE,
    Cosine,
    Covariance,
    Distance,
    InfoNCE,
    SIGReg,
    Variance,
    make_distance,
)
from stepjepa.objectives.term import Context

SOURCE = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
TARGET = torch.tensor([[4.0, 3.0], [5.0, 0.0]])
HAND = torch.tensor([[1.0, 0.0, 2.0], [-1.0, 0.0, 0.0], [3.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("distance", "wanted"),
    [
        # 1 - 24/25 and 1 - 0; |(-1, 1)| and |(-5, 2)|; (1 + 1) / 2 and (25 + 4) / 2
        (Cosine(), 0.04 + 1.0),
        (L2(), math.sqrt(2) + math.sqrt(29)),
        (MSE(), 1.0 + 14.5),
    ],
)
def test_distances_by_hand(distance: Distance, wanted: float) -> None:
    assert distance(SOURCE, TARGET).item() == pytest.approx(wanted)


@pytest.mark.parametrize("temperature", [1.0, 0.07])
def test_infonce_by_hand(temperature: float) -> None:
    # Cosines: (3,4)/5 with (4,3)/5 is 0.96 and with (1,0) is 0.6; (0,1) with them 0.6 and 0.
    first = math.log(math.exp(0.96 / temperature) + math.exp(0.6 / temperature)) - 0.96 / temperature
    second = math.log(math.exp(0.6 / temperature) + 1) - 0
    found = make_distance("infonce", temperature)(SOURCE, TARGET)
    assert found.item() == pytest.approx(first + second, rel=1e-5)


@pytest.mark.parametrize("name", ["cosine", "l2", "mse", "infonce"])
def test_order_does_not_matter_and_halves_are_summed_in_single_precision(name: str) -> None:
    source, target = torch.randn(7, 5).bfloat16(), torch.randn(7, 5).bfloat16()
    order, loss = torch.randperm(7), make_distance(name)
    found = loss(source, target)
    assert found.dtype == torch.float32
    assert loss(source[order], target[order]).item() == pytest.approx(found.item(), rel=1e-5)


def test_a_constant_map_minimises_all_but_infonce() -> None:
    constant = torch.ones(5, 3)
    for name in ("cosine", "l2", "mse"):
        assert make_distance(name)(constant, constant).item() == pytest.approx(0, abs=1e-5)
    assert InfoNCE()(constant, constant).item() == pytest.approx(5 * math.log(5))


# -- against collapse --------------------------------------------------------------------------------------------------


def test_variance_and_covariance_by_hand() -> None:
    # Variances 4, 0 and 1, so that only the second dimension is below 1: 1 - sqrt(1e-4) = 0.99 over 3 dimensions.
    assert Variance().value(HAND, Context()).item() == pytest.approx(0.99 / 3, rel=1e-5)
    # Centred columns (0, -2, 2) and (1, -1, 0): covariance (0 + 2 + 0) / 2 = 1, counted twice, over 3 dimensions.
    assert Covariance().value(HAND, Context()).item() == pytest.approx(2 / 3, rel=1e-5)


@pytest.mark.parametrize("shape", [(5, 13), (13, 5)])
def test_covariance_against_a_loop(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    matrix = torch.cov(values.T)
    slow = sum(float(matrix[i, j]) ** 2 for i in range(shape[1]) for j in range(shape[1]) if i != j) / shape[1]
    assert Covariance().value(values, Context()).item() == pytest.approx(slow, rel=1e-4)


def test_sigreg_by_hand() -> None:
    """One dimension, where every direction is the same up to its sign: two points at 0 and at pi."""
    points = torch.tensor([[0.0], [math.pi]])
    # mean cos = (1 + cos(pi t)) / 2, mean sin = sin(pi t) / 2; the trapezoidal rule at 33 points over -3 to 3.
    total = 0.0
    for index in range(33):
        t = -3 + 6 * index / 32
        apart = ((1 + math.cos(math.pi * t)) / 2 - math.exp(-t * t / 2)) ** 2 + (math.sin(math.pi * t) / 2) ** 2
        total += apart * math.exp(-t * t / 2) * (6 / 32) * (0.5 if index in (0, 32) else 1.0)
    assert SIGReg(directions=3).value(points, Context()).item() == pytest.approx(2 * total, rel=1e-5)


def test_sigreg_is_least_for_a_standard_normal() -> None:
    normal = torch.randn((257, 11), generator=torch.Generator().manual_seed(0))
    least = SIGReg().value(normal, Context()).item()
    for other in (normal * 3, normal * 0.3, normal + 1, torch.ones_like(normal), normal[:, :1].repeat(1, 11)):
        assert SIGReg().value(other, Context()).item() > 3 * least


def test_sigreg_draws_by_seed_and_step() -> None:
    values = torch.randn((7, 11)) * 2
    first, again, step, seed = (
        SIGReg().value(values, Context(step=step, seed=seed)) for step, seed in [(2, 5), (2, 5), (3, 5), (2, 6)]
    )
    assert torch.equal(first, again)
    assert first not in (step, seed)


@pytest.mark.parametrize("term", [SIGReg(), Variance()], ids=lambda term: type(term).__name__)
def test_a_constant_is_pushed_apart(term: SIGReg | Variance) -> None:
    """From embeddings that are all but one vector, gradient descent finds a set that is spread."""
    noise = torch.randn((31, 5), generator=torch.Generator().manual_seed(0))
    values = (torch.ones((31, 5)) + 1e-3 * noise).requires_grad_()
    optimizer = torch.optim.SGD([values], lr=1.0)
    for step in range(200):
        optimizer.zero_grad()
        term.value(values, Context(step=step)).backward()
        optimizer.step()
    assert values.detach().std(0).min() > 0.5
