"""The kernels and the precision in which a ``JepaTrainer`` trains and evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import tiny
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.objective import jepa_loss
from stepjepa.training.trainer import JepaTrainer
from stepjepa.views.sequences import SampledRecord


class Kernels(TrainerCallback):
    """Whether torch may take cuDNN's attention, at every step."""

    def __init__(self, failing: bool) -> None:
        self.seen: list[bool] = []
        self._failing = failing

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        if self._failing:
            raise ValueError("stop here")


@pytest.mark.sample(2)
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_no_plan_of_cudnn_for_every_shape(
    before: bool, failing: bool, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = Kernels(failing)
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        trainer = JepaTrainer(
            tiny.make_model("llama"),
            tiny.arguments(tmp_path, max_steps=2),
            train_dataset=tiny.records(),
            processing_class=tiny_tokenizer,
            callbacks=[callback],
        )
        if failing:
            with pytest.raises(ValueError, match="stop here"):
                trainer.train_steps(None)
        else:
            trainer.train_steps(None)
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert callback.seen == [False] * (1 if failing else 2)


def test_an_evaluation_before_training_runs_in_its_precision(tiny_tokenizer: Any, tmp_path: Path) -> None:
    records, config = tiny.records(), JepaConfig(jepa_loss_type="infonce")
    losses = {}
    for bf16 in (False, True):
        trainer = JepaTrainer(
            tiny.make_model("llama"),
            tiny.arguments(tmp_path, bf16=bf16, per_device_eval_batch_size=len(records)),
            config,
            eval_dataset=records,
            processing_class=tiny_tokenizer,
        )
        (prepared,) = trainer.held_out.values()
        dataset = prepared.dataset
        batch = trainer.data_collator(SampledRecord(dataset[number].record) for number in range(len(dataset)))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            wanted = jepa_loss(trainer.model.eval(), batch, trainer.objective).parts["lm_loss"].item()
        losses[bf16] = trainer.evaluate()["eval_lm_loss"]
        assert losses[bf16] == pytest.approx(wanted, rel=1e-6)
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
