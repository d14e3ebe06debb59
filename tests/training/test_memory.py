"""Bytes that training keeps, told from shapes, against the tensors of real optimizers and passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments

import tiny
from stepjepa.config import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.models.lm_head import LMHead
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.training.memory import LiveBytes, Sharding, activations, kept_bytes


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), report_to="none", use_cpu=True, **changes)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd", "adagrad"])
def test_weights_gradients_and_states_of_a_real_step(optim: str, kind: str, tmp_path: Path) -> None:
    model: Any = tiny.make_model("llama")
    model = model.to(torch.bfloat16) if kind == "bfloat16" else model
    model = add_lora(model, LoraSettings(3), [5, 7]) if kind == "lora" else model
    parts = kept_bytes(model, optim)
    optimizer = Trainer(model, arguments(tmp_path, optim=optim)).create_optimizer()
    ids = torch.arange(13)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    trained = [p for p in model.parameters() if p.requires_grad]
    states = [value for value in tree_leaves(list(optimizer.state.values())) if isinstance(value, Tensor)]
    assert parts["weights"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert parts["gradients"] == sum(p.grad.numel() * p.grad.element_size() for p in trained)
    # But for the number of steps that each tensor keeps.
    steps = 4 * sum(value.numel() == 1 for value in states)
    assert parts["optimizer states"] == sum(state.numel() * state.element_size() for state in states) - steps


def test_sharding_and_mixed_precision_by_hand(tmp_path: Path) -> None:
    model: Any = tiny.make_model("llama").to(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    assert kept_bytes(model, "adamw_torch", processes=3) == {
        "weights": 2 * count,
        "gradients": 2 * count,
        "optimizer states": 4 * count,
        "buckets of DDP": 2 * count,
    }
    mixed = arguments(tmp_path, bf16=True)
    assert Sharding.of(mixed, None, 3) == Sharding()
    stage = Sharding.of(mixed, {"zero_optimization": {"stage": 2}}, 3)
    assert stage == Sharding("ZeRO-2", 1, 3, 3, "beside")
    # Weights and gradients of 16 bits; a copy in float32 and two averages of it, spread out.
    found = kept_bytes(model, "adamw_torch", processes=3, sharding=stage)
    assert found == {"weights": 2 * count, "gradients": round(2 * count / 3), "optimizer states": round(12 * count / 3)}
    whole = kept_bytes(model, "adamw_torch", processes=3, sharding=Sharding("FSDP", 3, 3, 3, "instead"), ema=True)
    assert (whole["weights"], whole["averaged weights"]) == (round(4 * count / 3), 4 * count)
    assert "optimizer states" not in kept_bytes(model, "adafactor")


def test_quantized_weights_by_hand() -> None:
    model: Any = add_lora(tiny.make_model("llama"), LoraSettings(3), [])
    # Two layers of width 33: queries and output 30, key and value 10 each, an MLP of 37.
    linear = 2 * (33 * 30 + 2 * 33 * 10 + 30 * 33 + 3 * 33 * 37)
    plain, small = (kept_bytes(model, "sgd", quantized=kind)["weights"] for kind in (None, "4bit"))
    assert plain - small == pytest.approx(linear * (4 - 0.516), abs=1)


@pytest.mark.parametrize("way", ["none", "full", "mixed", "lora"])
def test_activations_on_shapes_are_those_of_a_real_pass(way: str, tiny_tokenizer: Any) -> None:
    model: Any = tiny.make_model("llama", hidden_size=66, num_hidden_layers=3).train()
    enable_trees(model)
    model = add_lora(model, LoraSettings(16), [5, 7]) if way == "lora" else model
    if way == "full":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    LMHead(model)
    config = JepaConfig(mode="step-jepa")
    objective, batch = Objective.from_config(config), tiny.batch_of(tiny_tokenizer, config)
    mixed = torch.bfloat16 if way == "mixed" else None
    with LiveBytes(model) as live, torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "mixed"):
        losses = jepa_loss(model, batch, objective)
    inputs = sum(value.untyped_storage().nbytes() for value in batch.values() if isinstance(value, Tensor))
    told = activations(model, batch, objective, mixed)
    assert told is not None
    assert abs(told - live.total) <= inputs + 0.02 * live.total
    losses.loss.backward()
    del losses
    assert live.total < 0.7 * told, "the backward pass frees what it has used"
