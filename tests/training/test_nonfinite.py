"""Losses and gradients that are not finite: named, and never stepped upon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny
from stepjepa.base.errors import UserError
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.objective import Losses
from stepjepa.training.trainer import JepaTrainer

# Stands in the record that is to do harm, and in no other.
BAD = "~"


def made(count: int, bad: Sequence[int]) -> list[Any]:
    """Records of lines 1 to ``count`` with pairs; those of the lines ``bad`` hold the token that does harm."""
    return [
        tiny.make_record("", f"q{line}{BAD if line in bad else ''}", f"a{line}.\n\nb{line}\n\nc", line=line)
        for line in range(1, count + 1)
    ]


class _Harm(torch.autograd.Function):
    """The same values, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * math.inf


def harm(model: Any, tokenizer: Any, kind: str) -> None:
    """Let one token's embedding make the loss NaN, or only its gradient infinite."""
    (token,) = tokenizer.encode(BAD, add_special_tokens=False)

    def spoil(_module: Any, args: tuple[Tensor], output: Tensor) -> Tensor | None:
        bad = (args[0] == token)[..., None]
        if not bool(bad.any()):
            return None
        return output.masked_fill(bad, math.nan) if kind == "loss" else _Harm.apply(output)

    model.get_input_embeddings().register_forward_hook(spoil)


def trainer_of(tokenizer: Any, folder: Path, records: Any, kind: str, **changes: Any) -> JepaTrainer:
    fixed = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "learning_rate": 0.01}
    model = tiny.make_model("llama", seed=3)
    harm(model, tokenizer, kind)
    return JepaTrainer(
        model,
        tiny.arguments(folder, **(fixed | changes)),
        JepaConfig(mode="step-jepa", encoding="rows"),
        train_dataset=records,
        processing_class=tokenizer,
    )


def weights(trainer: JepaTrainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


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
    assert "checkpoint-1 is complete: resume" in message
    assert "\n" not in message
    assert trainer.state.global_step == 1
    assert same(load_file(tmp_path / "checkpoint-1" / "model.safetensors"), weights(trainer))


def test_overflows_of_fp16_are_the_scalers(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """torch's own, on the CPU: steps that it skips are no errors, and losses that are not finite stay ours."""

    def run(bad: Sequence[int], scale: float, folder: Path) -> JepaTrainer:
        trainer = trainer_of(tiny_tokenizer, folder, made(16, bad), "loss", max_steps=8)
        accelerator, scaler = trainer.accelerator, torch.amp.GradScaler("cpu", init_scale=scale)
        accelerator.scaler = scaler
        accelerator.unscale_gradients = lambda *_: [scaler.unscale_(each.optimizer) for each in accelerator._optimizers]
        trainer.train()
        return trainer

    first = run([], 2.0**127, tmp_path / "a")
    assert 1 <= round(127 - math.log2(first.accelerator.scaler.get_scale())) < 8
    assert all(bool(torch.isfinite(value).all()) for value in weights(first).values())
    with pytest.raises(UserError, match="step 2: LM loss is nan"):
        run([3], 2.0**7, tmp_path / "b")


def test_a_finite_gradient_of_an_infinite_loss_is_found(tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_tokenizer, tmp_path, made(4, []), "loss")
    value, none = torch.tensor(2.0, requires_grad=True), torch.zeros(0)
    for added, wanted in ((0.0, 3.0), (math.inf, math.nan)):
        value.grad = None
        trainer.guard.watch(Losses(3 * value + added, {}, {}, none, none)).backward()
        assert value.grad is not None
        assert value.grad.item() == pytest.approx(wanted, nan_ok=True)
