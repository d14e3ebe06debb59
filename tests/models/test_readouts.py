"""What an embedding is read from: one token or several, any layer, through a head or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import Forest, path
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import find_head, forward, read
from stepjepa.models.predictor_head import PredictorHead, attach_head


def test_read_averages_the_tokens_up_to_the_place() -> None:
    flat = torch.arange(22.0).reshape(11, 2)
    index, pooled = torch.tensor([4, 9, 0]), torch.tensor([3, 1, 1])
    assert read(flat, index, pooled).tolist() == [[6.0, 7.0], [18.0, 19.0], [0.0, 1.0]]
    assert torch.equal(read(flat, index, None), flat[index])
    assert read(flat, index[:0], pooled[:0]).shape == (0, 2)


CASES = {
    "separate": {"mode": "llm-jepa"},
    "separate, K 3": {"mode": "llm-jepa", "predictors": 3},
    "separate, K 0": {"mode": "llm-jepa", "predictors": 0},
    "separate, front": {"mode": "llm-jepa", "predictors": 2, "front_pred": True},
    "separate, reverse": {"mode": "llm-jepa", "predictors": 2, "reverse_pred": True},
    "branched": {"mode": "llm-jepa", "layout": "branched", "predictors": 2},
    "branched, front": {"mode": "llm-jepa", "layout": "branched", "predictors": 2, "front_pred": True},
    "branched, reverse": {"mode": "llm-jepa", "layout": "branched", "predictors": 2, "reverse_pred": True},
    "steps": {"mode": "step-jepa", "pairs": "all", "predictors": 3},
    "steps, K 0": {"mode": "step-jepa", "pairs": "all", "predictors": 0},
    "in place": {"mode": "step-jepa", "layout": "inplace", "pairs": "all"},
    "in place, K 0": {"mode": "step-jepa", "layout": "inplace", "pairs": "all", "predictors": 0},
}


def view_text(tokenizer: Any, forest: Forest, pair: int, side: int) -> str:
    """The text of the tokens that a readout averages."""
    assert forest.pooled is not None
    end = int(forest.pairs[pair, side]) + 1
    return str(tokenizer.decode(forest.input_ids[end - int(forest.pooled[pair, side]) : end]))


@pytest.mark.parametrize("name", CASES)
def test_what_is_averaged_is_the_view(name: str, trained_tokenizer: Any) -> None:
    config = JepaConfig(pooling="mean", **CASES[name])  # type: ignore[arg-type]
    forest = ForestBuilder(trained_tokenizer, config).build(tiny.records())[0]
    assert config.predictors is not None
    predictors = "".join(f"<|predictor_{number}|>" for number in range(1, config.predictors + 1))
    if config.mode == "step-jepa":
        steps = ["3+4=7.\n\n", "7+5=12\n\n", "So it is\n\n", "12"]
        views = [(predictors or steps[index], steps[index + 1]) for index in range(3)]
    else:
        question, answer = "What is 3+4+5?", "3+4=7.\n\n7+5=12\n\nSo it is\n\n12"
        first, second = (answer, question) if config.reverse_pred else (question, answer)
        views = [(first if config.front_pred or not predictors else predictors, second)]
    assert [
        (view_text(trained_tokenizer, forest, i, 0), view_text(trained_tokenizer, forest, i, 1))
        for i in range(len(views))
    ] == views
    # One token each, unless asked for more.
    last = ForestBuilder(trained_tokenizer, JepaConfig(**CASES[name])).build(tiny.records())[0]  # type: ignore[arg-type]
    assert np.array_equal(last.pairs, forest.pairs)
    assert last.pooled is not None
    assert (last.pooled == 1).all()


@pytest.mark.parametrize("encoding", ["forest", "rows"])
@pytest.mark.parametrize("layer", [-1, 0, 1, -2])
@pytest.mark.parametrize("name", ["separate, K 3", "branched, reverse", "steps"])
def test_means_of_any_layer_are_those_of_separate_passes(
    name: str, layer: int, encoding: str, trained_tokenizer: Any
) -> None:
    config = JepaConfig(pooling="mean", **CASES[name])  # type: ignore[arg-type]
    forests = ForestBuilder(trained_tokenizer, config).build(tiny.records())
    model = tiny.make_model("llama")
    slow: tuple[list[Any], list[Any]] = ([], [])
    with torch.no_grad():
        for forest in forests:
            assert forest.pooled is not None
            for pair, pooled in zip(forest.pairs, forest.pooled, strict=True):
                for side in (0, 1):
                    place = int(pair[side])
                    segment = next(i for i, s in enumerate(forest.segments) if s.start <= place < s.end)
                    indices = path(forest, segment)
                    ids = torch.from_numpy(forest.input_ids[indices]).long()[None]
                    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[layer][0]
                    end = int(np.flatnonzero(indices == place)[0]) + 1
                    slow[side].append(states[end - int(pooled[side]) : end].mean(0))
        enable_forest(model)
        outputs = forward(model, ForestCollator(0, encoding)(forests), layer)
    tiny.assert_same(outputs.source, torch.stack(slow[0]))
    tiny.assert_same(outputs.target, torch.stack(slow[1]))


@pytest.mark.parametrize("encoding", ["forest", "rows"])
def test_triples_are_read_in_the_main_text(encoding: str, trained_tokenizer: Any) -> None:
    from dataclasses import replace

    config = JepaConfig(mode="step-jepa", pairs="all")
    forests = ForestBuilder(trained_tokenizer, config).build(tiny.records())
    drawn = [replace(forests[0], triple=(1, 5, 7)), forests[1], replace(forests[2], triple=(0, 2, 11))]
    model = tiny.make_model("llama")
    with torch.no_grad():
        slow = []
        for forest in drawn:
            if forest.triple is not None:
                ids = torch.from_numpy(forest.without_views().input_ids).long()[None]
                states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1][0]
                slow.append(states[list(forest.triple)])
        enable_forest(model)
        outputs = forward(model, ForestCollator(0, encoding)(drawn))
    tiny.assert_same(outputs.triples, torch.stack(slow))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2_window", "qwen3_moe", "gpt_neox"])
def test_layers_of_every_kind_of_model(architecture: str, trained_tokenizer: Any) -> None:
    forests = ForestBuilder(trained_tokenizer, JepaConfig()).build(tiny.records()[:1])
    model = tiny.make_model(architecture, "eager" if architecture.startswith("gemma2") else "sdpa")
    enable_forest(model)
    batch = ForestCollator(0)(forests)
    last = model.config.get_text_config().num_hidden_layers
    with torch.no_grad():
        default, same = forward(model, batch), forward(model, batch, last)
        first, inner = forward(model, batch, 0), forward(model, batch, 1)
    tiny.assert_same(default.source, same.source)
    for other in (first, inner):
        assert torch.equal(other.lm_loss, default.lm_loss)
        assert not torch.allclose(other.source, default.source, atol=1e-3)
    with pytest.raises(ValueError, match=f"jepa_layer: expected -{last + 1} to {last} for a model of {last} layers"):
        forward(model, batch, last + 1)


def test_heads_by_hand() -> None:
    values = torch.tensor([[1.0, -2.0]])
    linear, mlp = PredictorHead("linear", 2), PredictorHead("mlp", 2)
    with torch.no_grad():
        for parameter in [*linear.parameters(), *mlp.parameters()]:
            parameter.fill_(0.5)
    # 0.5 * (1 - 2) + 0.5
    assert torch.allclose(linear(values), torch.zeros(1, 2))
    # GELU(0) four times, times 0.5, plus 0.5
    assert torch.allclose(mlp(values), torch.full((1, 2), 0.5))
    with pytest.raises(ValueError, match="expected linear or mlp, got 'deep'"):
        PredictorHead("deep", 2)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_head_maps_the_source_alone(kind: str, trained_tokenizer: Any) -> None:
    batch = ForestCollator(0)(ForestBuilder(trained_tokenizer, JepaConfig()).build(tiny.records()))
    model = tiny.make_model("llama")
    enable_forest(model)
    with torch.no_grad():
        without = forward(model, batch)
        torch.manual_seed(9)
        attach_head(model, kind, seed=5)
        attached = find_head(model)
        assert attached is not None
        with_head = forward(model, batch)
        assert torch.equal(with_head.source, attached(without.source))
    assert torch.equal(with_head.target, without.target)
    assert torch.equal(with_head.lm_loss, without.lm_loss)
    other = tiny.make_model("llama")
    torch.manual_seed(10)
    attach_head(other, kind, seed=5)
    for first, second in zip(attached.parameters(), other.predictor_head.parameters(), strict=True):
        assert torch.equal(first, second)
