"""The one forward pass: logits at labels, embeddings at readouts, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.architecture import find_decoder
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward

ModelFactory = Callable[..., Any]


def batch(tokenizer: Any) -> dict[str, torch.Tensor]:
    return ForestCollator(0)(ForestBuilder(tokenizer, JepaConfig(predictors=1)).build(tiny.records()))


@pytest.mark.parametrize("architecture", ["llama", "gemma2_window", "gpt2", "qwen3_moe"])
def test_against_the_whole_output(architecture: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """The head sees labelled rows only, and still scales and caps them as the model does."""
    model = tiny_model(architecture, "eager")
    enable_forest(model)
    given = batch(trained_tokenizer)
    with torch.no_grad():
        outputs = forward(model, given, keep_logits=True)
        lm_loss = forward(model, given).lm_loss
        states = tiny.hidden_states(model, given)
        whole = states.flatten(0, 1)
        logits = model.get_output_embeddings()(whole[given["label_index"]])
        if cap := getattr(model.config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
    tiny.assert_same(outputs.logits, logits)
    tiny.assert_same(lm_loss, F.cross_entropy(logits, given["label_ids"], reduction="sum"))
    tiny.assert_same(outputs.lm_loss, lm_loss)
    assert torch.equal(outputs.source, whole[given["source_index"]])
    assert torch.equal(outputs.target, whole[given["target_index"]])


def test_no_hook_is_left(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    model = tiny_model("llama")
    enable_forest(model)
    given = batch(trained_tokenizer)
    forward(model, given)
    assert not model.model._forward_hooks
    with pytest.raises(IndexError):
        forward(model, {**given, "source_index": torch.tensor([10**6])})
    assert not model.model._forward_hooks


def test_a_forest_needs_its_attention(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """Guards ``enable_forest``: without it the pass runs, and is wrong."""
    ready, plain = tiny_model("llama"), tiny_model("llama")
    enable_forest(ready)
    given = batch(trained_tokenizer)
    assert float((forward(ready, given).target - forward(plain, given).target).detach().abs().max()) > 0.1


def test_wrappers_are_looked_through(tiny_model: ModelFactory) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = tiny_model("llama")
    assert find_decoder(model) is find_decoder(Wrapper(Wrapper(model))) is model.model


def test_a_model_without_a_decoder_is_refused() -> None:
    class Bare(nn.Module):
        def get_decoder(self) -> nn.Module:
            return self

    with pytest.raises(ValueError, match="expected a causal language model with a decoder, got Bare"):
        find_decoder(Bare())
