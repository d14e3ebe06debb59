"""Losses and gradients that are not finite: named, and never stepped upon."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from harmful import made, same, trainer_of, weights
from stepjepa.errors import UserError
from stepjepa.objectives.objective import Losses
from stepjepa.training.nonfinite import MOST_IN_A_ROW
from stepjepa.training.trainer import JepaTrainer


@pytest.mark.parametrize(
    ("kind", "said"),
    [("loss", "LM loss is nan and alignment loss is nan, with "), ("gradient", "the gradient is not finite (the loss")],
)
def test_stop_names_step_part_and_records_and_changes_no_weight(
    kind: str, said: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    # Steps of two micro-batches of two records, in the order of the file but sorted within the step.
    saved = {"save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(12, [7]), kind, gradient_accumulation_steps=2, **saved)
    # Trainer's own filter waits for the device in every micro-batch.
    assert not trainer.args.logging_nan_inf_filter
    with pytest.raises(UserError) as caught:
        trainer.train()
    message = str(caught.value)
    assert message.startswith(f"step 2: {said}")
    assert "memory.jsonl:7" in message
    # Of the losses the micro-batch is known, of the gradient the step.
    assert message.count("memory.jsonl:") == (2 if kind == "loss" else 4)
    assert "--on_nonfinite skip" in message
    assert "checkpoint-1 is complete: resume" in message
    assert "\n" not in message
    assert trainer.state.global_step == 1
    assert same(load_file(tmp_path / "checkpoint-1" / "model.safetensors"), weights(trainer))


@pytest.mark.parametrize(("kind", "optim"), [("loss", "sgd"), ("gradient", "adamw_torch_fused")])
def test_skip_is_a_run_without_the_step(kind: str, optim: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Weights are those of a run on the other records alone, at a rate that depends on no number of steps."""
    jepa = {"target_grad": "ema", "ema_decay": 0.5} if optim == "sgd" else {}
    fixed = {"optim": optim, "lr_scheduler_type": "constant", "weight_decay": 0.1, "gradient_accumulation_steps": 2}
    skipping = trainer_of(
        tiny_tokenizer, tmp_path / "a", made(12, [6]), kind, jepa=jepa, on_nonfinite="skip", logging_steps=3, **fixed
    )
    skipping.train()
    rest = [record for record in made(12, []) if not 5 <= record.line <= 8]
    without = trainer_of(tiny_tokenizer, tmp_path / "b", rest, kind, jepa=jepa, max_steps=2, logging_steps=2, **fixed)
    without.train()
    assert skipping.guard.skipped == 1
    assert same(weights(skipping), weights(without))
    if jepa:
        assert skipping.ema is not None
        assert without.ema is not None
        assert same(skipping.ema._average, without.ema._average)
    (line,), (other,) = ([x for x in t.state.log_history if "learning_rate" in x] for t in (skipping, without))
    assert line["nonfinite_steps"] == 1
    for name in ("loss", "lm_loss", "jepa_loss", "num_tokens", "matched_similarity", "source_rank"):
        assert line[name] == pytest.approx(other[name], rel=1e-6), name
    assert "nonfinite_steps" not in other


def test_a_window_of_nothing_but_skipped_steps_has_no_loss(tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(6, [3]), "loss", on_nonfinite="skip")
    trainer.train()
    lines = [line for line in trainer.state.log_history if "learning_rate" in line]
    assert ["loss" in line for line in lines] == [True, False, True]
    assert [line.get("nonfinite_steps") for line in lines] == [None, 1, 1]
    assert all(math.isfinite(value) for line in trainer.state.log_history for value in line.values())


def test_skipping_is_bounded_and_said(tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A good step in between begins the count anew.
    bad, count = {1, *range(5, 40)}, 2 * (MOST_IN_A_ROW + 4)
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(count, bad), "loss", on_nonfinite="skip", max_steps=count)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UserError, match=f"{MOST_IN_A_ROW} steps in a row were skipped before"),
    ):
        trainer.train()
    assert trainer.guard.skipped == 1 + MOST_IN_A_ROW
    assert trainer.state.global_step == 2 + MOST_IN_A_ROW
    said = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(said) == 1 + MOST_IN_A_ROW
    assert "memory.jsonl:1" in said[0]


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def test_resumed_it_goes_on_counting(tiny_tokenizer: Any, tmp_path: Path) -> None:
    def run(folder: Path, steps: int, checkpoint: str | None = None) -> JepaTrainer:
        saved = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        trainer = trainer_of(tiny_tokenizer, folder, made(12, [3, 4, 5, 9]), "loss", on_nonfinite="skip", **saved)
        trainer.add_callback(_StopAt(steps))
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "part", 3)
    again = run(tmp_path / "part", 6, str(tmp_path / "part" / "checkpoint-3"))
    assert whole.guard.skipped == again.guard.skipped == 3
    assert same(weights(whole), weights(again))


def test_overflows_of_fp16_are_the_scalers(
    tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's own, on the CPU: steps that it skips are no errors, and losses that are not finite stay ours."""

    def run(bad: Sequence[int], scale: float, folder: Path) -> JepaTrainer:
        trainer = trainer_of(tiny_tokenizer, folder, made(16, bad), "loss", on_nonfinite="skip", max_steps=8)
        accelerator, scaler = trainer.accelerator, torch.amp.GradScaler("cpu", init_scale=scale)
        accelerator.scaler = scaler

        def unscale(*_: Any) -> None:
            for optimizer in accelerator._optimizers:
                scaler.unscale_(optimizer.optimizer)

        accelerator.unscale_gradients = unscale
        trainer.train()
        return trainer

    with caplog.at_level(logging.WARNING):
        first = run([], 2.0**127, tmp_path / "a")
        assert first.guard.skipped == 0
        assert 1 <= round(127 - math.log2(first.accelerator.scaler.get_scale())) < 8
        assert not [record for record in caplog.records if record.name.startswith("stepjepa")]
        second = run([3], 2.0**7, tmp_path / "b")
    assert second.guard.skipped == 1
    assert second.accelerator.scaler.get_scale() == 2.0**6
    for trainer in (first, second):
        assert all(bool(torch.isfinite(value).all()) for value in weights(trainer).values())


def test_a_finite_gradient_of_an_infinite_loss_is_found(tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(4, []), "loss")
    value, none = torch.tensor(2.0, requires_grad=True), torch.zeros(0)
    for added, wanted in ((0.0, 3.0), (math.inf, math.nan)):
        value.grad = None
        trainer.guard.watch(Losses(3 * value + added, {}, {}, none, none)).backward()
        assert value.grad is not None
        assert value.grad.item() == pytest.approx(wanted, nan_ok=True)
