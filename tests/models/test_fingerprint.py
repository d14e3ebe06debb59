"""The fingerprint of base weights: what training adds does not count, and every weight does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from stepjepa.config.jepa import JepaConfig
from stepjepa.models import fingerprint
from stepjepa.models.architecture import attach_heads
from stepjepa.models.fingerprint import weights_fingerprint
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.objectives.setup import set_up


def test_setting_up_changes_nothing(plain_tokenizer: Any) -> None:
    tokenizer, model = copy.deepcopy(plain_tokenizer), tiny.make_model("qwen3")
    before = weights_fingerprint(model, tokenizer)
    set_up(model, tokenizer, JepaConfig(predictors=3))
    attach_heads(model, {"predictor_head": nn.Linear(33, 33)})
    assert len(tokenizer) == len(plain_tokenizer) + 3
    assert weights_fingerprint(model, tokenizer) == before
    set_up(model, tokenizer, JepaConfig(mode="regular", plain=True))
    assert weights_fingerprint(model, tokenizer) == before


@pytest.mark.parametrize("name", ["llama", "qwen3"], ids=["tied", "untied"])
def test_an_adapter_changes_nothing(name: str, plain_tokenizer: Any) -> None:
    tokenizer, model = copy.deepcopy(plain_tokenizer), tiny.make_model(name)
    before = weights_fingerprint(model, tokenizer)
    adapted = add_lora(model, LoraSettings(rank=3), [])
    set_up(adapted, tokenizer, JepaConfig(predictors=2))
    assert any("lora_" in weight for weight, _ in adapted.named_parameters())
    assert weights_fingerprint(adapted, tokenizer) == before


def test_every_weight_counts(plain_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.make_model("qwen2")
    before = weights_fingerprint(model, plain_tokenizer)
    for name, weight in model.named_parameters():
        last = len(plain_tokenizer) - 1 if "embed_tokens" in name or "lm_head" in name else len(weight) - 1
        with torch.no_grad():
            remaining = weight[last].clone()
            weight[last] += 1
            assert weights_fingerprint(model, plain_tokenizer) != before, name
            weight[last] = remaining
    assert weights_fingerprint(model, plain_tokenizer) == before
    # Rows beyond the tokenizer are drawn when tokens are added.
    with torch.no_grad():
        model.get_input_embeddings().weight[len(plain_tokenizer) :] += 1
    assert weights_fingerprint(model, plain_tokenizer) == before
    # Of a large tensor chunks are hashed, the first and the last bytes among them.
    monkeypatch.setattr(fingerprint, "CHUNK", 8)
    monkeypatch.setattr(fingerprint, "CHUNKS", 7)
    small = weights_fingerprint(model, plain_tokenizer)
    assert small != before
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight *= 2
    assert weights_fingerprint(model, plain_tokenizer) not in (before, small)


def test_a_model_without_weights_has_none(plain_tokenizer: Any) -> None:
    assert weights_fingerprint(tiny.make_model("llama").to("meta"), plain_tokenizer) is None
