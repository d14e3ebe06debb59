"""Alignment losses, each with a value worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from stepjepa.objectives.alignment import L2, MSE, Cosine, Distance, InfoNCE, make_distance

each_loss = pytest.mark.parametrize("name", ["cosine", "l2", "mse", "infonce"])
each_sum = pytest.mark.parametrize("name", ["cosine", "l2", "mse"])

SOURCE = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
TARGET = torch.tensor([[4.0, 3.0], [5.0, 0.0]])


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


@each_sum
def test_a_batch_in_parts_gives_the_same_sum(name: str) -> None:
    """Accumulation relies on it."""
    source, target = torch.randn(7, 5), torch.randn(7, 5)
    loss = make_distance(name)
    parts = loss(source[:3], target[:3]) + loss(source[3:], target[3:])
    assert loss(source, target).item() == pytest.approx(parts.item(), rel=1e-6)


@each_loss
def test_order_does_not_matter_and_halves_are_summed_in_single_precision(name: str) -> None:
    source, target = torch.randn(7, 5).bfloat16(), torch.randn(7, 5).bfloat16()
    order, loss = torch.randperm(7), make_distance(name)
    found = loss(source, target)
    assert found.dtype == torch.float32
    assert loss(source[order], target[order]).item() == pytest.approx(found.item(), rel=1e-5)


@each_loss
def test_gradient_reaches_both_sides(name: str) -> None:
    source, target = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    make_distance(name)(source, target).backward()
    for side in (source, target):
        assert side.grad is not None
        assert (side.grad.abs().amax(1) > 0).all()


@each_sum
def test_a_constant_map_minimises_all_but_infonce(name: str) -> None:
    constant = torch.ones(5, 3)
    assert make_distance(name)(constant, constant).item() == pytest.approx(0, abs=1e-5)
    assert InfoNCE()(constant, constant).item() == pytest.approx(5 * math.log(5))
