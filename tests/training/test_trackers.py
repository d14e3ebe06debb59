"""Weights & Biases gets the settings of the objective, so that runs can be filtered and grouped by them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from stepjepa import JepaConfig, JepaTrainer


@pytest.mark.sample(1)
@pytest.mark.parametrize("reports", [["wandb"], ["tensorboard"]])
def test_the_run_of_a_tracker_has_the_objective(reports: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    """A run that somebody else has begun in W&B, while this one reports elsewhere, is left alone."""
    logged: dict[str, Any] = {}
    config = SimpleNamespace(update=lambda values, allow_val_change: logged.update(values))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(config=config)))
    rows = [{"messages": list(record.messages)} for record in tiny.records()]
    trainer = JepaTrainer(
        "preset:tiny",
        tiny.arguments(tmp_path / "run", max_steps=1),
        JepaConfig(mode="step-jepa", lbd=0.7),
        train_dataset=rows,
    )
    # After the constructor, which would look for the library.
    trainer.args.report_to = reports
    trainer.train()
    assert logged == ({"jepa": trainer.jepa.to_dict()} if reports == ["wandb"] else {})
    assert trainer.jepa.to_dict()["lbd"] == 0.7
