"""Invariant 2: views change neither the LM loss nor its gradient; both are those of the model's own loss.

Layout ``inplace`` is exempt by its definition: predictor tokens stand inside the text and the target step is cut off
from what precedes it, so the text that the LM loss is computed on is seen differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.objectives.objective import Losses, Objective, jepa_loss

ModelFactory = Callable[..., Any]

VIEWS = [
    JepaConfig(mode="llm-jepa", layout="separate", predictors=2),
    JepaConfig(mode="llm-jepa", layout="branched", predictors=1),
    JepaConfig(mode="step-jepa", predictors=2, pairs="all"),
    JepaConfig(mode="step-jepa", predictors=0),
    JepaConfig(mode="step-jepa", predictors=1, front_pred=True, reverse_pred=True),
    JepaConfig(mode="regular"),
]
ids = [f"{c.mode}-{c.layout}-{c.predictors}{'-front-reverse' if c.front_pred else ''}" for c in VIEWS]
ARCHITECTURES = ["llama", "gpt2", "gemma2_window", "qwen2_window", "qwen3_moe", *tiny.LAYERS_BEFORE_HEAD]


def losses(
    model: Any, tokenizer: Any, config: JepaConfig, encoding: str = "tree", *, gamma: float = 1.0, lbd: float = 0.0
) -> Losses:
    batch = tiny.batch_of(tokenizer, config, encoding=encoding)
    return jepa_loss(model, batch, Objective.from_config(JepaConfig(gamma=gamma, lbd=lbd)))


def own_loss(model: Any, tokenizer: Any, config: JepaConfig) -> Tensor:
    """The model's own loss on unpadded main texts, one at a time, as a mean over all their labelled tokens."""
    total, count = torch.zeros(()), 0
    for record in tiny.tokenized(tokenizer, config):
        row = torch.from_numpy(record.ids.astype(np.int64))[None]
        # The model shifts labels itself.
        taught = torch.from_numpy(record.labels + 1).long()
        labels = torch.full_like(row, -100)
        labels[0, taught] = row[0, taught]
        total = total + model(input_ids=row, labels=labels, use_cache=False).loss * len(taught)
        count += len(taught)
    return total / count


@pytest.mark.sample(7)
@pytest.mark.parametrize("encoding", ["tree", "rows"])
@pytest.mark.parametrize("config", VIEWS, ids=ids)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lm_loss_is_the_models_own(
    architecture: str, config: JepaConfig, encoding: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    plain, model = tiny_model(architecture, "eager"), tiny_model(architecture, "eager")
    if encoding == "tree":
        enable_trees(model)
    expected = own_loss(plain, trained_tokenizer, config)
    result = losses(model, trained_tokenizer, config, encoding)
    tiny.assert_same(result.parts["lm_loss"], expected)
    assert torch.equal(result.loss, result.parts["lm_loss"])
    tiny.assert_same_gradients(tiny.gradients(model, result.loss), tiny.gradients(plain, expected))


def test_predictor_rows_take_no_gradient_from_the_lm_loss(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """With untied embeddings nothing but the alignment loss moves the predictor tokens."""
    rows = trained_tokenizer.convert_tokens_to_ids(["<|predictor_1|>", "<|predictor_2|>"])
    for lbd, moves in [(0.0, False), (1.0, True)]:
        model = tiny_model("qwen3")
        enable_trees(model)
        result = losses(model, trained_tokenizer, VIEWS[0], lbd=lbd).loss
        gradient = tiny.gradients(model, result)["model.embed_tokens.weight"]
        assert bool((gradient[rows].abs().amax(1) > 1e-6).all()) == moves
        assert bool((gradient[rows] == 0).all()) != moves
