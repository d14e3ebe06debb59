"""What an embedding is read from: one token or several, of any layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from slow_trees import separately
from stepjepa.batch.collate import Batch, Item
from stepjepa.config import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.models.encode import Encoded, encode, read


def test_read_averages_some_tokens() -> None:
    states = torch.arange(22.0).reshape(11, 2)
    index = torch.tensor([4, 9, 0])
    batch = Batch(
        source_index=index,
        source_tokens=torch.tensor([2, 3, 4, 9, 0]),
        source_pair=torch.tensor([0, 0, 0, 1, 2]),
        target_index=index,
    )
    assert read(states, batch, "source").tolist() == [[6.0, 7.0], [18.0, 19.0], [0.0, 1.0]]
    assert torch.equal(read(states, batch, "target"), states[index])
    half = read(states.bfloat16(), batch, "source")
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [[6.0, 7.0], [18.0, 19.0], [0.0, 1.0]]
    assert read(states, Batch(source_index=index[:0]), "source").shape == (0, 2)


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


@pytest.mark.parametrize("name", CASES)
def test_what_is_averaged_is_the_view(name: str, trained_tokenizer: Any) -> None:
    """From the text of a record to the text of the tokens that are averaged."""
    config = JepaConfig(pooling="mean", **CASES[name])  # type: ignore[arg-type]
    record = tiny.tokenized(trained_tokenizer, config)[0]
    texts: dict[tuple[int, str], str] = {}
    for sequence in tiny.collator(trained_tokenizer, config).sequences(Item(record)):
        for pair, kind, start, end in sequence.readouts:
            texts[pair, kind] = trained_tokenizer.decode(sequence.ids[start:end])
    assert config.predictors is not None
    predictors = "".join(f"<|predictor_{number}|>" for number in range(1, config.predictors + 1))
    if config.mode == "step-jepa":
        steps = ["3+4=7.\n\n", "7+5=12\n\n", "So it is\n\n", "12"]
        views = [(predictors or steps[index], steps[index + 1]) for index in range(3)]
    else:
        question, answer = "What is 3+4+5?", "3+4=7.\n\n7+5=12\n\nSo it is\n\n12"
        first, second = (answer, question) if config.reverse_pred else (question, answer)
        views = [(first if config.front_pred or not predictors else predictors, second)]
    assert texts == {
        (n, kind): text for n, pair in enumerate(views) for kind, text in zip(("source", "target"), pair, strict=True)
    }


@pytest.mark.parametrize("encoding", ["tree", "rows"])
@pytest.mark.parametrize("layer", [-1, 0, 1, -2])
@pytest.mark.parametrize("name", ["separate, K 3", "branched, reverse", "steps"])
def test_means_of_any_layer_are_those_of_separate_passes(
    name: str, layer: int, encoding: str, trained_tokenizer: Any
) -> None:
    config = JepaConfig(pooling="mean", **CASES[name])  # type: ignore[arg-type]
    records = tiny.tokenized(trained_tokenizer, config)
    collator = tiny.collator(trained_tokenizer, config, encoding=encoding)
    items = [Item(record) for record in records]
    model = tiny.make_model("llama")
    with torch.no_grad():
        slow = separately(model, [collator.sequences(item) for item in items], layer)
        enable_trees(model)

        def evaluate(encoded: Encoded) -> dict[str, torch.Tensor]:
            return dict(zip(("source", "target"), encoded.pairs, strict=True))

        found = encode(model, collator(items), evaluate, layer=layer)
    tiny.assert_same(found["source"], slow.source)
    tiny.assert_same(found["target"], slow.target)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2_window", "qwen3_moe", "gpt_neox"])
def test_layers_of_every_kind_of_model(architecture: str, trained_tokenizer: Any) -> None:
    """The last one is the same by both its numbers, after the final norm; others are others."""
    model = tiny.make_model(architecture, "eager" if architecture.startswith("gemma2") else "sdpa")
    enable_trees(model)
    batch = tiny.batch_of(trained_tokenizer, JepaConfig(), tiny.records()[:1])
    last = model.config.get_text_config().num_hidden_layers

    def source(layer: int) -> torch.Tensor:
        with torch.no_grad():
            return encode(model, batch, lambda encoded: {"source": encoded.pairs[0]}, layer=layer)["source"]

    tiny.assert_same(source(-1), source(last))
    for layer in (0, 1):
        assert not torch.allclose(source(-1), source(layer), atol=1e-3)
    with pytest.raises(ValueError, match=f"jepa_layer: expected -{last + 1} to {last} for a model of {last} layers"):
        source(last + 1)
