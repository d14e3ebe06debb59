"""LM loss and alignment loss as one objective."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from stepjepa.models.embeddings import Outputs

from stepjepa.config import JepaConfig
from stepjepa.objectives.alignment import Cosine, InfoNCE
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.regularizers import Covariance, SIGReg, Variance


def outputs(pairs: int = 2) -> Outputs:
    """An LM loss of two positions; ``pairs`` pairs in two dimensions."""
    lm_loss = torch.tensor(math.log(3) + math.log(2), requires_grad=True)
    source = torch.tensor([[3.0, 4.0], [0.0, 2.0]], requires_grad=True)[:pairs]
    target = torch.tensor([[4.0, 3.0], [5.0, 0.0]], requires_grad=True)[:pairs]
    return Outputs(lm_loss, source, target, torch.empty(0, 3, 2))


def test_by_hand() -> None:
    given = outputs()
    objective = Objective(Cosine(), gamma=0.5, lbd=2.0)
    sums = objective.sums(given)
    assert sums["lm_loss"].item() == pytest.approx(math.log(3) + math.log(2))
    assert sums["jepa_loss"].item() == pytest.approx(1.04)
    parts = objective.parts(sums, torch.tensor([2, 2, 0]))
    assert parts["lm_loss"].item() == pytest.approx((math.log(3) + math.log(2)) / 2)
    assert parts["jepa_loss"].item() == pytest.approx(0.52)
    assert parts["loss"].item() == pytest.approx(0.5 * (math.log(3) + math.log(2)) / 2 + 2.0 * 0.52)


def test_counts_are_those_of_the_whole_step() -> None:
    """Two micro-batches divided by the step's counts add up to the mean over both."""
    given = outputs()
    objective = Objective(Cosine(), lbd=0.3)
    first = objective.sums(Outputs(given.lm_loss / 4, given.source[:1], given.target[:1], given.triples))
    second = objective.sums(Outputs(3 * given.lm_loss / 4, given.source[1:], given.target[1:], given.triples))
    counts = torch.tensor([2.0, 2.0, 0.0], dtype=torch.float64)
    halves = objective.parts(first, counts)["loss"] + objective.parts(second, counts)["loss"]
    whole = objective.parts(objective.sums(given), counts)["loss"]
    assert halves.item() == pytest.approx(whole.item(), rel=1e-6)
    both = {"lm_loss": first["lm_loss"] + second["lm_loss"], "jepa_loss": first["jepa_loss"] + second["jepa_loss"]}
    assert objective.parts(both, counts)["loss"].item() == pytest.approx(whole.item(), rel=1e-6)


def test_nothing_to_align_is_zero_and_in_the_graph() -> None:
    given = outputs(pairs=0)
    source = torch.ones(3, 2, requires_grad=True)
    objective = Objective(InfoNCE(), lbd=1.0)
    sums = objective.sums(Outputs(given.lm_loss, source[:0], given.target, given.triples))
    assert sums["jepa_loss"].item() == 0
    parts = objective.parts(sums, torch.tensor([2, 0, 0]))
    assert parts["jepa_loss"].item() == 0
    assert parts["loss"].item() == parts["lm_loss"].item()
    parts["loss"].backward()
    assert source.grad is not None
    assert not source.grad.any()


def test_nothing_to_predict_is_zero() -> None:
    given = outputs()
    objective = Objective(Cosine())
    sums = objective.sums(given._replace(lm_loss=0 * given.lm_loss))
    parts = objective.parts(sums, torch.tensor([0, 2, 0]))
    assert parts["lm_loss"].item() == 0
    assert parts["loss"].item() == pytest.approx(0.1 * 0.52)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_in_single_precision(dtype: torch.dtype) -> None:
    given = outputs()
    halved = given._replace(source=given.source.to(dtype), target=given.target.to(dtype))
    assert Objective(Cosine()).sums(halved)["jepa_loss"].dtype == torch.float32


def test_from_config() -> None:
    config = JepaConfig(jepa_loss_type="infonce", infonce_temperature=0.2, gamma=0.5, lbd=3.0)
    assert Objective.from_config(config) == Objective(InfoNCE(0.2), 0.5, 3.0)
    assert Objective.from_config(JepaConfig(mode="regular")) == Objective(None)
    assert Objective.from_config(JepaConfig(mode="regular")).names == ["lm_loss"]
    every = JepaConfig(sigreg=0.1, variance=0.2, covariance=0.3, stp=0.4, target_grad="stop")
    objective = Objective.from_config(every, seed=7)
    assert objective.regularizers == {
        "sigreg_loss": (0.1, SIGReg(seed=7)),
        "variance_loss": (0.2, Variance()),
        "covariance_loss": (0.3, Covariance()),
    }
    assert objective.names == ["lm_loss", "jepa_loss", *objective.regularizers, "stp_loss"]
    assert not objective.through_target


def test_every_part_has_its_weight_and_its_count() -> None:
    given = outputs()
    triples = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]]])
    terms: dict[str, Any] = {"variance_loss": (3.0, Variance()), "covariance_loss": (5.0, Covariance())}
    objective = Objective(Cosine(), gamma=0.5, lbd=2.0, regularizers=terms, stp=7.0)
    sums = objective.sums(given._replace(triples=triples))
    parts = objective.parts(sums, torch.tensor([2, 2, 2]))
    # Source (3, 4), (0, 2): variances 4.5 and 2, covariance 3. Target (4, 3), (5, 0): 0.5 and 4.5, covariance -1.5.
    variance = 0.5 * (1 - math.sqrt(0.5 + 1e-4))
    covariance = (2 * 3**2) / 2 + (2 * 1.5**2) / 2
    assert parts["variance_loss"].item() == pytest.approx(variance, rel=1e-5)
    assert parts["covariance_loss"].item() == pytest.approx(covariance, rel=1e-5)
    # One triple turns by a right angle, one goes straight on.
    assert parts["stp_loss"].item() == pytest.approx(0.5)
    total = 0.5 * math.log(6) / 2 + 2 * 0.52 + 3 * variance + 5 * covariance + 7 * 0.5
    assert parts["loss"].item() == pytest.approx(total, rel=1e-5)


def test_sigreg_is_the_mean_over_both_views() -> None:
    given = outputs()
    term = SIGReg(seed=3)
    sums = Objective(Cosine(), regularizers={"sigreg_loss": (1.0, term)}).sums(given, step=5)
    both = (term(given.source, 5) + term(given.target, 5)) / 2
    assert sums["sigreg_loss"].item() == pytest.approx(2 * both.item())


@pytest.mark.parametrize(("through", "moved"), [(True, True), (False, False)])
def test_stop_gradient_keeps_the_alignment_loss_from_the_target(through: bool, moved: bool) -> None:
    given = outputs()
    target = torch.tensor([[4.0, 3.0], [5.0, 1.0]], requires_grad=True)
    for alignment in (Cosine(), InfoNCE()):
        target.grad = None
        objective = Objective(alignment, through_target=through)
        objective.parts(objective.sums(given._replace(target=target)), torch.tensor([2, 2, 0]))["loss"].backward()
        assert (target.grad is not None and bool(target.grad.any())) == moved


def test_schedules_by_hand() -> None:
    def lbd_at(schedule: Any) -> list[float]:
        objective = Objective(Cosine(), lbd=2.0, schedule=schedule, warmup=0.5)
        return [round(objective.lbd_at(progress), 6) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]

    assert lbd_at("constant") == [2.0] * 5
    assert lbd_at("warmup") == [0.0, 1.0, 2.0, 2.0, 2.0]
    half = math.sqrt(0.5)
    assert lbd_at("cosine") == [2.0, round(1 + half, 6), 1.0, round(1 - half, 6), 0.0]
    given = outputs()
    objective = Objective(Cosine(), lbd=2.0, schedule="warmup", warmup=0.5)
    sums, counts = objective.sums(given), torch.tensor([2, 2, 0])
    early, late = objective.parts(sums, counts, 0.0)["loss"], objective.parts(sums, counts)["loss"]
    assert late.item() - early.item() == pytest.approx(2 * 0.52)
