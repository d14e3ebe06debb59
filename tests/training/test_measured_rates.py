"""Measuring, with toy sizes: everything runs, and what comes out is a speed."""

from __future__ import annotations

import pytest
import torch

from stepjepa.training import measured_rates
from stepjepa.training.measured_rates import measure, now_of, short_training

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def toy_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_rates, "PRESET", "preset:tiny")
    monkeypatch.setattr(measured_rates, "BATCHES", (1, 5))
    monkeypatch.setattr(measured_rates, "STEPS", 4)
    monkeypatch.setattr(measured_rates, "SECONDS", 0.01)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="sizes are those of a CPU")
def test_all_rates_are_measured() -> None:
    found = measure()
    assert found.dtype == "float32"
    assert found.threads == torch.get_num_threads()
    assert not found.overlaps
    assert found.clock == ("cpu" if found.threads == 1 else "wall")
    assert min(found.products, found.attention, found.moved, found.call, found.factor, found.held) > 0
    assert min(found.step, found.held_beside) >= 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="Trainer would take the accelerator")
def test_a_short_training_is_foretold_and_measured() -> None:
    less, more = (short_training(batch, "float32", "cpu", CPU, steps=3) for batch in (1, 5))
    assert 0 < less.work.products < more.work.products
    assert less.told < more.told
    assert min(less.seconds, more.seconds) > 0


def test_clocks_go_forward() -> None:
    for clock in ("cpu", "wall"):
        now = now_of(clock, CPU)
        assert now() <= now()
