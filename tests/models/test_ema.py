"""The target through averaged weights: by hand, and against the same average kept outside."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from stepjepa.chat.tokens import all_predictor_ids
from stepjepa.config import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.models.encode import EmaEncoder, read
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.training.trainer import JepaTrainer


def test_the_average_by_hand() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    encoder = EmaEncoder(model, 0.75)
    torch.nn.init.constant_(model.weight, 6.0)
    encoder.update(model)
    # 0.75 * 2 + 0.25 * 6 = 3, then 0.75 * 3 + 0.25 * 6 = 3.75
    assert encoder._average["weight"].item() == 3.0
    encoder.update(model)
    assert encoder._average["weight"].item() == 3.75


@pytest.mark.parametrize("layer", [-1, 1])
@pytest.mark.parametrize("encoding", ["tree", "rows"])
def test_states_are_those_of_the_averaged_model(encoding: str, layer: int, trained_tokenizer: Any) -> None:
    batch = tiny.batch_of(trained_tokenizer, JepaConfig(mode="step-jepa", pairs="all"), encoding=encoding)
    model, other = tiny.make_model("llama", seed=1), tiny.make_model("llama", seed=2)
    for each in (model, other):
        enable_trees(each)
    encoder = EmaEncoder(model, 0.5)
    encoder.update(other)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for mean, second in zip(average.parameters(), other.parameters(), strict=True):
            mean.copy_((mean + second) / 2)
        slow = tiny.hidden_states(average, batch, layer)
        before = tiny.hidden_states(model, batch, layer)
    found = encoder.states(batch, layer)
    tiny.assert_same(found, slow)
    assert not found.requires_grad
    assert not torch.allclose(found, before, atol=1e-2)


def test_half_precision_keeps_its_average_in_single() -> None:
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.constant_(model.weight, 1.0)
    encoder = EmaEncoder(model, 0.999)
    torch.nn.init.constant_(model.weight, 2.0)
    for _ in range(3):
        encoder.update(model)
    assert encoder._average["weight"].item() == pytest.approx(2 - 0.999**3, abs=1e-6)
    assert next(encoder._model.parameters()).dtype == torch.bfloat16


def test_what_an_adapter_leaves_frozen_is_shared(tiny_tokenizer: Any) -> None:
    model: Any = add_lora(tiny.make_model("llama"), LoraSettings(3), all_predictor_ids(tiny_tokenizer))
    encoder = EmaEncoder(model, 0.5)
    own = dict(encoder._model.named_parameters())
    for name, parameter in model.named_parameters():
        assert (own[name] is parameter) == (not parameter.requires_grad), name
        assert parameter.requires_grad == (name in encoder._average)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny.make_model("llama", seed=1)
    encoder = EmaEncoder(model, 0.5)
    encoder.update(tiny.make_model("llama", seed=2))
    encoder.save(tmp_path)
    again = EmaEncoder(model, 0.5)
    again.load(tmp_path)
    assert all(torch.equal(value, again._average[name]) for name, value in encoder._average.items())
    with pytest.raises(ValueError, match=r"expected ema\.safetensors"):
        again.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"expected the averages of 1 weights in .*, got \d+"):
        EmaEncoder(torch.nn.Linear(1, 1, bias=False), 0.5).load(tmp_path)


def test_the_trainer_updates_it_once_a_step_and_scores_with_it(trained_tokenizer: Any, tmp_path: Path) -> None:
    """Two steps of SGD by the trainer, against the same two written out."""
    config = JepaConfig(mode="step-jepa", target_grad="ema", ema_decay=0.5, lbd=0.7)
    records = tiny.records()[:2]
    trainer = JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(
            tmp_path, learning_rate=0.05, optim="sgd", per_device_train_batch_size=2, lr_scheduler_type="constant"
        ),
        config,
        train_dataset=records,
        processing_class=copy.deepcopy(trained_tokenizer),
    )
    trainer.train()
    model = tiny.make_model("llama", seed=3).train()
    enable_trees(model)
    average = copy.deepcopy(model).eval()
    batch = tiny.batch_of(trained_tokenizer, config, records)
    regular = Objective.from_config(JepaConfig(mode="regular"))
    for step in range(3):
        with torch.no_grad():
            target = read(tiny.hidden_states(average, batch), batch, "target")
        lm = jepa_loss(model, batch, regular).loss
        source = read(tiny.hidden_states(model, batch), batch, "source")
        jepa = (1 - torch.nn.functional.cosine_similarity(source, target)).mean()
        line = trainer.state.log_history[step]
        assert line["jepa_loss"] == pytest.approx(jepa.item(), rel=1e-4)
        model.zero_grad()
        (lm + 0.7 * jepa).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter, mean in zip(model.parameters(), average.parameters(), strict=True):
                parameter.sub_(0.05 * parameter.grad)
                mean.copy_(0.5 * mean + 0.5 * parameter)
    for (name, value), same in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.allclose(value, same, atol=1e-5), name
