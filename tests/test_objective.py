"""LM loss and alignment loss as one objective."""

from __future__ import annotations

import math

import pytest
import torch

from stepjepa.alignment import Cosine, InfoNCE
from stepjepa.config import JepaConfig
from stepjepa.embeddings import Outputs
from stepjepa.objective import Objective, Sums


def outputs(pairs: int = 2) -> tuple[Outputs, torch.Tensor]:
    """Two labelled positions over three tokens; ``pairs`` pairs in two dimensions."""
    logits = torch.tensor([[0.0, 0.0, 0.0], [math.log(2.0), 0.0, 0.0]], requires_grad=True)
    source = torch.tensor([[3.0, 4.0], [0.0, 2.0]], requires_grad=True)[:pairs]
    target = torch.tensor([[4.0, 3.0], [5.0, 0.0]], requires_grad=True)[:pairs]
    return Outputs(logits, source, target), torch.tensor([1, 0])


def test_by_hand() -> None:
    given, labels = outputs()
    objective = Objective(Cosine(), gamma=0.5, lbd=2.0)
    sums = objective.sums(given, labels)
    # -log(1/3) and -log(2/4)
    assert sums.lm.item() == pytest.approx(math.log(3) + math.log(2))
    assert sums.jepa.item() == pytest.approx(1.04)
    parts = objective.parts(sums, torch.tensor([2, 2]))
    assert parts.lm_loss.item() == pytest.approx((math.log(3) + math.log(2)) / 2)
    assert parts.jepa_loss.item() == pytest.approx(0.52)
    assert parts.loss.item() == pytest.approx(0.5 * (math.log(3) + math.log(2)) / 2 + 2.0 * 0.52)


def test_counts_are_those_of_the_whole_step() -> None:
    """Two micro-batches divided by the step's counts add up to the mean over both."""
    given, labels = outputs()
    objective = Objective(Cosine(), lbd=0.3)
    first = objective.sums(Outputs(given.logits[:1], given.source[:1], given.target[:1]), labels[:1])
    second = objective.sums(Outputs(given.logits[1:], given.source[1:], given.target[1:]), labels[1:])
    counts = torch.tensor([2.0, 2.0], dtype=torch.float64)
    halves = objective.parts(first, counts).loss + objective.parts(second, counts).loss
    whole = objective.parts(objective.sums(given, labels), counts).loss
    assert halves.item() == pytest.approx(whole.item(), rel=1e-6)
    both = Sums(first.lm + second.lm, first.jepa + second.jepa)
    assert objective.parts(both, counts).loss.item() == pytest.approx(whole.item(), rel=1e-6)


def test_nothing_to_align_is_zero_and_in_the_graph() -> None:
    given, labels = outputs(pairs=0)
    source = torch.ones(3, 2, requires_grad=True)
    objective = Objective(InfoNCE(), lbd=1.0)
    sums = objective.sums(Outputs(given.logits, source[:0], given.target), labels)
    assert sums.jepa.item() == 0
    parts = objective.parts(sums, torch.tensor([2, 0]))
    assert parts.jepa_loss.item() == 0
    assert parts.loss.item() == parts.lm_loss.item()
    parts.loss.backward()
    assert source.grad is not None
    assert not source.grad.any()


def test_nothing_to_predict_is_zero() -> None:
    given, _ = outputs()
    objective = Objective(Cosine())
    sums = objective.sums(given._replace(logits=given.logits[:0]), torch.empty(0, dtype=torch.long))
    parts = objective.parts(sums, torch.tensor([0, 2]))
    assert parts.lm_loss.item() == 0
    assert parts.loss.item() == pytest.approx(0.1 * 0.52)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_in_single_precision(dtype: torch.dtype) -> None:
    given, labels = outputs()
    sums = Objective(Cosine()).sums(Outputs(*(value.to(dtype) for value in given)), labels)
    assert sums.lm.dtype == sums.jepa.dtype == torch.float32
    assert sums.lm.item() == pytest.approx(math.log(6), rel=1e-2)


def test_from_config() -> None:
    config = JepaConfig(jepa_loss_type="infonce", infonce_temperature=0.2, gamma=0.5, lbd=3.0)
    assert Objective.from_config(config) == Objective(InfoNCE(0.2), 0.5, 3.0)
