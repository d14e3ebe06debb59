"""Alignment losses, each with a value worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stepjepa.objectives.alignment import L2, MSE, Cosine, InfoNCE, make_distance

NAMES = ["cosine", "l2", "mse", "infonce"]
each_loss = pytest.mark.parametrize("name", NAMES)

SOURCE = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
TARGET = torch.tensor([[4.0, 3.0], [5.0, 0.0]])


def test_cosine_by_hand() -> None:
    # 1 - 24/25 and 1 - 0
    assert Cosine()(SOURCE, TARGET).item() == pytest.approx(0.04 + 1.0)


def test_l2_by_hand() -> None:
    # |(-1, 1)| and |(-5, 2)|
    assert L2()(SOURCE, TARGET).item() == pytest.approx(math.sqrt(2) + math.sqrt(29))


def test_mse_by_hand() -> None:
    # (1 + 1) / 2 and (25 + 4) / 2
    assert MSE()(SOURCE, TARGET).item() == pytest.approx(1.0 + 14.5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.07])
def test_infonce_by_hand(temperature: float) -> None:
    # Cosines: (3,4)/5 with (4,3)/5 is 0.96 and with (1,0) is 0.6; (0,1) with them 0.6 and 0.
    first = math.log(math.exp(0.96 / temperature) + math.exp(0.6 / temperature)) - 0.96 / temperature
    second = math.log(math.exp(0.6 / temperature) + 1) - 0
    assert InfoNCE(temperature)(SOURCE, TARGET).item() == pytest.approx(first + second, rel=1e-5)


@each_loss
def test_no_pairs_is_zero(name: str) -> None:
    source = torch.empty(0, 7, requires_grad=True)
    loss = make_distance(name)(source, torch.empty(0, 7))
    assert loss.shape == ()
    assert loss.item() == 0
    loss.backward()


def test_one_pair_has_no_negatives() -> None:
    assert InfoNCE()(SOURCE[:1], TARGET[:1]).item() == 0


@pytest.mark.parametrize("name", ["cosine", "l2", "mse"])
def test_sums_over_pairs(name: str) -> None:
    """A batch in parts gives the same sum: accumulation relies on it."""
    source, target = torch.randn(7, 5), torch.randn(7, 5)
    loss = make_distance(name)
    whole = loss(source, target)
    parts = loss(source[:3], target[:3]) + loss(source[3:], target[3:])
    singles = sum(loss(source[i : i + 1], target[i : i + 1]) for i in range(7))
    assert whole.item() == pytest.approx(parts.item(), rel=1e-6) == pytest.approx(float(singles), rel=1e-6)


@each_loss
def test_order_of_pairs_does_not_matter(name: str) -> None:
    source, target = torch.randn(7, 5), torch.randn(7, 5)
    order = torch.randperm(7)
    loss = make_distance(name)
    assert loss(source[order], target[order]).item() == pytest.approx(loss(source, target).item(), rel=1e-5)


@each_loss
def test_single_precision_from_halves(name: str) -> None:
    source, target = torch.randn(3, 5).bfloat16(), torch.randn(3, 5).bfloat16()
    loss = make_distance(name)(source, target)
    assert loss.dtype == torch.float32
    assert loss.item() == make_distance(name)(source.float(), target.float()).item()


@each_loss
def test_gradient_reaches_both_sides(name: str) -> None:
    source, target = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    make_distance(name)(source, target).backward()
    for side in (source, target):
        assert side.grad is not None
        assert (side.grad.abs().amax(1) > 0).all()


@pytest.mark.parametrize("name", ["cosine", "l2", "mse"])
def test_a_constant_map_minimises_all_but_infonce(name: str) -> None:
    constant = torch.ones(5, 3)
    assert make_distance(name)(constant, constant).item() == pytest.approx(0, abs=1e-5)
    assert InfoNCE()(constant, constant).item() == pytest.approx(5 * math.log(5))


def test_temperature_is_passed_on() -> None:
    found: Tensor = make_distance("infonce", 0.5)(SOURCE, TARGET)
    assert found.item() == InfoNCE(0.5)(SOURCE, TARGET).item() != InfoNCE(0.07)(SOURCE, TARGET).item()


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="expected one of cosine, l2, mse, infonce, got 'cos'"):
        make_distance("cos")
