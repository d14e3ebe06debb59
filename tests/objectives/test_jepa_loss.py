"""The objective outside the trainer: accumulation, processes, TRL's own loss, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepjepa import JepaConfig, JepaLoss
from tiny import assert_same_gradients, gradients, make_model, records

CONFIG = {"mode": "step-jepa", "pairs": "all", "lbd": 0.7}


def prepared(tokenizer: Any, **changes: Any) -> tuple[Any, JepaLoss]:
    model = make_model("llama")
    return model, JepaLoss(model, tokenizer, JepaConfig(**CONFIG | changes))


def test_accumulated_batches_give_the_gradient_of_one(tiny_tokenizer: Any) -> None:
    model, jepa = prepared(tiny_tokenizer)
    whole = gradients(model, jepa(model, jepa.collate(records())).loss)
    parts = [jepa.collate(records()[:1]), jepa.collate(records()[1:])]
    counts = jepa.counts(parts)
    losses = [jepa(model, part, counts).loss for part in parts]
    assert_same_gradients(gradients(model, torch.stack(losses).sum()), whole)


@pytest.mark.parametrize("name", ["sigreg", "stp"])
def test_a_call_is_a_step_counted_from_0_unless_it_names_one(name: str, tiny_tokenizer: Any) -> None:
    model, jepa = prepared(tiny_tokenizer, **{name: 0.5})
    batch = jepa.collate(records())

    def drawn(**named: int) -> float:
        # What it draws depends on the step.
        return jepa(model, batch, **named).parts[f"{name}_loss"].item()

    found = [drawn() for _ in range(3)]
    assert [drawn(step=step) for step in range(3)] == found
    assert len(set(found)) == 3


def test_rows_are_packed_for_the_accelerator_that_the_model_will_move_to(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepared(tiny_tokenizer)[1]._collator.attention_length is not None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert prepared(tiny_tokenizer)[1]._collator.attention_length is None


def test_without_views_a_batch_trains_the_lm_loss_alone(tiny_tokenizer: Any) -> None:
    model, jepa = prepared(tiny_tokenizer)
    batch = jepa.collate([{"messages": list(record.messages)} for record in records()], views=False)
    out = jepa(model, batch)
    assert (out.monitors, out.parts["jepa_loss"].item()) == ({}, 0.0)
    full = jepa(model, jepa.collate(records()))
    assert out.parts["lm_loss"].item() == pytest.approx(full.parts["lm_loss"].item(), rel=1e-5)
    assert full.monitors["matched_similarity"] == pytest.approx(1 - full.parts["jepa_loss"].item(), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"jepa_ratio": 0.5}, "jepa_ratio: use 1.0, .*views=False"),
        ({"jepa_epochs": 2.0}, "jepa_epochs: use None, .*views=False"),
        ({"target_grad": "ema"}, "JepaTrainer"),
    ],
)
def test_what_only_the_trainer_does_is_refused(tiny_tokenizer: Any, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        prepared(tiny_tokenizer, **changes)
