"""Invariant 4: one row each, many rows in one batch, any order, any padding: the same losses and gradients.

In double precision, where nothing but a real difference is left; the losses themselves are in single precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import Forest
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import Outputs, forward
from stepjepa.objectives.objective import Objective, Sums

ModelFactory = Callable[..., Any]

EXACT = 1e-6

CONFIGURATIONS = {
    "llm separate": JepaConfig(mode="llm-jepa", layout="separate", predictors=1),
    "llm branched": JepaConfig(mode="llm-jepa", layout="branched", predictors=2),
    "step branched": JepaConfig(mode="step-jepa", predictors=2, pairs="all"),
    "step inplace": JepaConfig(mode="step-jepa", layout="inplace", predictors=2, pairs="all"),
    "regular": JepaConfig(mode="regular"),
}


def encodings(name: str) -> tuple[str, ...]:
    return ("forest",) if name == "step inplace" else ("forest", "rows")


CASES = [(name, encoding) for name in CONFIGURATIONS for encoding in encodings(name)]


def run(
    model: Any,
    forests: Sequence[Forest | None],
    encoding: str,
    loss: str = "l2",
    padding: int = 0,
    *,
    keep_logits: bool = False,
) -> tuple[Outputs, Sums]:
    batch = ForestCollator(padding, encoding)(forests)
    outputs = forward(model, batch, keep_logits=keep_logits)
    objective = Objective.from_config(JepaConfig(jepa_loss_type=loss))  # type: ignore[arg-type]
    return outputs, objective.sums(outputs)


def ready(factory: ModelFactory, architecture: str, encoding: str) -> Any:
    model = factory(architecture).double()
    if encoding == "forest":
        enable_forest(model)
    return model


@pytest.mark.parametrize("architecture", ["llama", "gemma3_window", "gpt2"])
@pytest.mark.parametrize(("name", "encoding"), CASES)
def test_sums_add_up(
    name: str, encoding: str, architecture: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    forests = ForestBuilder(trained_tokenizer, CONFIGURATIONS[name]).build(tiny.records())
    assert len({len(forest) for forest in forests}) == 3, "nothing is padded"
    model = ready(tiny_model, architecture, encoding)
    single = [run(model, [forest], encoding)[1] for forest in forests]
    lm, jepa = (sum(sums[key] for sums in single) for key in ("lm_loss", "jepa_loss"))
    expected = tiny.gradients(model, 0.7 * lm + 1.3 * jepa)
    for order in itertools.permutations(range(3)):
        sums = run(model, [forests[index] for index in order], encoding, padding=order[0])[1]
        tiny.assert_same(sums["lm_loss"], lm.detach(), EXACT)
        tiny.assert_same(sums["jepa_loss"], jepa.detach(), EXACT)
        total = 0.7 * sums["lm_loss"] + 1.3 * sums["jepa_loss"]
        tiny.assert_same_gradients(tiny.gradients(model, total), expected, EXACT)


@pytest.mark.parametrize(("name", "encoding"), CASES)
def test_each_record_keeps_its_own_numbers(
    name: str, encoding: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    """Not only sums: every logit and every embedding, in the order of the records."""
    forests = ForestBuilder(trained_tokenizer, CONFIGURATIONS[name]).build(tiny.records())
    model = ready(tiny_model, "qwen3", encoding)
    order = [forests[2], forests[0], forests[1]]
    with torch.no_grad():
        together = run(model, order, encoding, padding=3, keep_logits=True)[0]
        single = [run(model, [forest], encoding, keep_logits=True)[0] for forest in order]
    for key in ("logits", "source", "target", "triples"):
        tiny.assert_same(getattr(together, key), torch.cat([getattr(outputs, key) for outputs in single]), 1e-12, key)


@pytest.mark.parametrize("encoding", ["forest", "rows"])
def test_infonce_depends_on_the_batch(encoding: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """By nature: its negatives are the other pairs of the batch. Their order does not matter, their presence does."""
    forests = ForestBuilder(trained_tokenizer, CONFIGURATIONS["llm separate"]).build(tiny.records())
    model = ready(tiny_model, "llama", encoding)
    with torch.no_grad():
        whole = run(model, forests, encoding, "infonce")[1]["jepa_loss"]
        assert torch.allclose(run(model, forests[::-1], encoding, "infonce")[1]["jepa_loss"], whole, rtol=1e-5)
        single: list[Tensor] = [run(model, [forest], encoding, "infonce")[1]["jepa_loss"] for forest in forests]
    assert torch.stack(single).abs().max() < 1e-6
    assert whole > 0.1


@pytest.mark.parametrize("encoding", ["forest", "rows"])
def test_empty_places_take_no_part(encoding: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    forests = ForestBuilder(trained_tokenizer, CONFIGURATIONS["llm separate"]).build(tiny.records())
    model = ready(tiny_model, "llama", encoding)
    full, holed = run(model, forests[:2], encoding)[1], run(model, [None, forests[0], None, forests[1]], encoding)[1]
    assert torch.equal(full["lm_loss"], holed["lm_loss"])
    assert torch.equal(full["jepa_loss"], holed["jepa_loss"])


@pytest.mark.parametrize("encoding", ["forest", "rows"])
def test_a_batch_of_empty_places_is_zero_and_reaches_every_parameter(encoding: str, tiny_model: ModelFactory) -> None:
    model = ready(tiny_model, "llama", encoding)
    sums = run(model, [None, None], encoding)[1]
    assert float(sums["lm_loss"].detach()) == float(sums["jepa_loss"].detach()) == 0
    (sums["lm_loss"] + sums["jepa_loss"]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_the_collator_counts(trained_tokenizer: Any) -> None:
    forests = ForestBuilder(trained_tokenizer, CONFIGURATIONS["step branched"]).build(tiny.records())
    batch = ForestCollator(0)(forests)
    assert batch["num_tokens"].item() == sum(len(forest) for forest in forests)
    assert batch["num_records"].tolist() == [3, 1]
    rows = ForestCollator(0, "rows")(forests)
    assert rows["input_ids"].shape[0] == sum(len(forest.segments) for forest in forests)
    assert rows["num_tokens"].item() > batch["num_tokens"].item()
    assert rows["num_records"].tolist() == [3, 1]


def test_plain_rows_carry_no_mask(trained_tokenizer: Any) -> None:
    """Attention takes its fast path where there is nothing to mask, also after the views were dropped."""
    forests = ForestBuilder(trained_tokenizer, CONFIGURATIONS["llm separate"]).build(tiny.records())
    assert "segment_ids" in ForestCollator(0)(forests)
    assert "segment_ids" not in ForestCollator(0)([forest.without_views() for forest in forests])
