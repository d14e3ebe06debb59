"""Public objects print on one short line, as a notebook shows them."""

from __future__ import annotations

from typing import Any

import pytest

from stepjepa import Alignment, InfoNCE, JepaConfig, LMLoss, LoraSettings, Objective, RunConfig
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.prepare import prepare
from stepjepa.models.encode import encode
from stepjepa.objectives.jepa import Jepa
from tiny import make_model, records


def test_what_a_jepa_makes_prints_on_one_line(tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(predictors=1))
    batch = jepa.collate(records()[:3])
    count, dimensions = len(records()), jepa.model.config.hidden_size
    printed: list[str] = []
    encode(jepa.model, batch, lambda encoded: printed.append(repr(encoded)) or {"states": encoded.states[-1]})
    rows, length = batch.input_ids.shape
    of_batch = f"3 records, {batch.pairs} pairs, {len(batch.label_ids)} labels; token ids [{rows}, {length}] on cpu"
    assert printed == [f"Encoded(states [{rows * length}, {dimensions}] of layers -1; Batch({of_batch}))"]
    expected = [
        (batch, f"Batch({of_batch})"),
        (batch.records, f"BatchRecords(3 records, {batch.records.plain_tokens} tokens as plain rows)"),
        (jepa.index(["one", "two", "one"]), f"TextIndex(2 texts, {dimensions} dimensions, side target)"),
        (jepa.embed_steps(["one", "two"]), f"SideEmbeddings(2 views, {dimensions} dimensions)"),
        (jepa.embed_steps(["one"]), f"SideEmbeddings(1 view, {dimensions} dimensions)"),
        (jepa.embed_pairs(records()), f"ViewEmbeddings({count} pairs, {dimensions} dimensions)"),
        (jepa.embedder(), "Embedder(side source, layer -1, pooling last)"),
        (prepare(records(), tiny_tokenizer, jepa.config).dataset, f"TokenizedDataset({count} records)"),
    ]
    for value, text in expected:
        assert repr(value) == text
    losses = jepa.loss(jepa.model, batch)
    loss, lm_loss, jepa_loss = (each.item() for each in (losses.loss, *losses.parts.values()))
    assert repr(losses) == f"Losses(loss {loss:.4f}, lm_loss {lm_loss:.4f}, jepa_loss {jepa_loss:.4f})"
    assert repr(Batch(input_ids=batch.input_ids)) == "Batch(input_ids)"
    assert repr(Objective([LMLoss(), Alignment(0.25, InfoNCE())])) == "Objective(1 lm_loss + 0.25 jepa_loss)"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (JepaConfig(), "JepaConfig()"),
        (JepaConfig(mode="step-jepa", predictors=3), "JepaConfig(mode='step-jepa', predictors=3)"),
        (
            RunConfig(model_name="m", lora=LoraSettings(rank=3), jepa=JepaConfig(lbd=0.5), trainer={"max_steps": 7}),
            "RunConfig(model_name='m', lora=LoraSettings(rank=3, alpha=None, dropout=0.0, targets='all-linear', "
            "dora=False, rslora=False), jepa=JepaConfig(lbd=0.5), trainer={'max_steps': 7})",
        ),
    ],
)
def test_a_configuration_prints_as_the_call_that_makes_it(config: Any, text: str) -> None:
    assert repr(config) == text
    assert eval(text) == config  # the text is that of this test
