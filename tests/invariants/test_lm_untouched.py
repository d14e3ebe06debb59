"""Invariant 2: views change neither the LM loss nor its gradient; both are those of the model's own loss.

Layout ``inplace`` is exempt by its definition: predictor tokens stand inside the row and the target step is cut off
from what precedes it, so the text that the LM loss is computed on is seen differently. Its labels are tested in
``test_segments.py``, its numbers against a dense mask in ``test_forest_equals_separate.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward
from stepjepa.objectives.objective import Objective, Parts

ModelFactory = Callable[..., Any]

VIEWS = [
    JepaConfig(mode="llm-jepa", layout="separate", predictors=2),
    JepaConfig(mode="llm-jepa", layout="branched", predictors=1),
    JepaConfig(mode="step-jepa", predictors=2, pairs="all"),
    JepaConfig(mode="step-jepa", predictors=0),
    JepaConfig(mode="step-jepa", predictors=1, front_pred=True, reverse_pred=True),
]
ids = [f"{c.mode}-{c.layout}-{c.predictors}{'-front-reverse' if c.front_pred else ''}" for c in VIEWS]
each_view = pytest.mark.parametrize("config", VIEWS, ids=ids)
each_encoding = pytest.mark.parametrize("encoding", ["forest", "rows"])
ARCHITECTURES = ["llama", "gpt2", "gemma2_window", "qwen2_window", "qwen3_moe"]


def build(tokenizer: Any, config: JepaConfig) -> list[Forest]:
    return ForestBuilder(tokenizer, config).build(tiny.records())


def parts(model: Any, forests: list[Forest], encoding: str, *, gamma: float = 1.0, lbd: float = 0.0) -> Parts:
    batch = ForestCollator(0, encoding)(forests)
    objective = Objective.from_config(JepaConfig(gamma=gamma, lbd=lbd))
    sums = objective.sums(forward(model, batch))
    return objective.parts(sums, torch.tensor([batch["label_ids"].numel(), batch["source_index"].numel(), 0]))


def own_loss(model: Any, forests: list[Forest]) -> Tensor:
    """The model's own loss on unpadded main texts, one at a time, as a mean over all their labelled tokens."""
    total, count = torch.zeros(()), 0
    for forest in forests:
        end = forest.segments[0].end
        row = torch.from_numpy(forest.input_ids[:end]).long()[None]
        # The model shifts labels itself, ours are shifted already.
        labels = torch.full_like(row, IGNORE)
        labels[0, 1:] = torch.from_numpy(forest.shift_labels[: end - 1]).long()
        number = int((labels != IGNORE).sum())
        total = total + model(input_ids=row, labels=labels, use_cache=False).loss * number
        count += number
    return total / count


@each_encoding
@each_view
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lm_loss_is_the_models_own(
    architecture: str, config: JepaConfig, encoding: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    forests = build(trained_tokenizer, config)
    plain, model = tiny_model(architecture, "eager"), tiny_model(architecture, "eager")
    if encoding == "forest":
        enable_forest(model)
    expected = own_loss(plain, forests)
    found = parts(model, forests, encoding)
    tiny.assert_same(found["lm_loss"], expected)
    assert torch.equal(found["loss"], found["lm_loss"])
    tiny.assert_same_gradients(tiny.gradients(model, found["loss"]), tiny.gradients(plain, expected))


@each_encoding
@each_view
def test_without_weight_views_change_nothing(
    config: JepaConfig, encoding: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    """``lbd=0`` is the regular mode: the same loss and the same gradient."""
    regular = build(trained_tokenizer, JepaConfig(mode="regular"))
    first, second = tiny_model("qwen3"), tiny_model("qwen3")
    enable_forest(first)
    with_views = parts(first, build(trained_tokenizer, config), "forest")
    without = parts(second, regular, encoding)
    assert with_views["jepa_loss"] > 0.01
    assert without["jepa_loss"] == 0
    tiny.assert_same(with_views["loss"], without["loss"])
    tiny.assert_same_gradients(tiny.gradients(first, with_views["loss"]), tiny.gradients(second, without["loss"]))


@each_view
def test_dropped_views_leave_the_regular_forest(config: JepaConfig, trained_tokenizer: Any) -> None:
    regular = build(trained_tokenizer, JepaConfig(mode="regular"))
    for forest, expected in zip(build(trained_tokenizer, config), regular, strict=True):
        tiny.assert_same_forest(forest.without_views(), expected)


def test_weights_of_the_parts(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """The gradient of the whole is ``gamma`` times the one's plus ``lbd`` times the other's."""
    forests = build(trained_tokenizer, VIEWS[0])

    def run(gamma: float, lbd: float) -> dict[str, Tensor]:
        model = tiny_model("llama")
        enable_forest(model)
        return tiny.gradients(model, parts(model, forests, "forest", gamma=gamma, lbd=lbd)["loss"])

    lm, jepa, both = run(1.0, 0.0), run(0.0, 1.0), run(0.7, 3.0)
    tiny.assert_same_gradients(both, {name: 0.7 * lm[name] + 3.0 * jepa[name] for name in lm})


def test_predictor_rows_take_no_gradient_from_the_lm_loss(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """With untied embeddings nothing but the alignment loss moves the predictor tokens."""
    rows = trained_tokenizer.convert_tokens_to_ids(["<|predictor_1|>", "<|predictor_2|>"])
    forests = build(trained_tokenizer, VIEWS[0])
    for lbd, moves in [(0.0, False), (1.0, True)]:
        model = tiny_model("qwen3")
        enable_forest(model)
        gradient = tiny.gradients(model, parts(model, forests, "forest", lbd=lbd)["loss"])["model.embed_tokens.weight"]
        assert bool((gradient[rows].abs().amax(1) > 1e-6).all()) == moves
        assert bool((gradient[rows] == 0).all()) != moves
