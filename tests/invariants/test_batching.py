"""Invariant 4: any order, any length of rows, any number of them, shared prefixes or not: the same, record for record.

In double precision, where nothing but a real difference is left; the losses themselves are in single precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from stepjepa.batch.costs import Costs
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.objectives.alignment import L2, Alignment, InfoNCE
from stepjepa.objectives.objective import Losses, Objective, jepa_loss
from stepjepa.objectives.text import LMLoss, PromptLoss, SemanticTube
from stepjepa.views.sequences import SampledRecord

ModelFactory = Callable[..., Any]

EXACT = 1e-6

CONFIGURATIONS = {
    "llm separate": JepaConfig(mode="llm-jepa", layout="separate", predictors=1),
    "llm branched": JepaConfig(mode="llm-jepa", layout="branched", predictors=2, pooling="mean"),
    "step branched": JepaConfig(mode="step-jepa", predictors=2, pairs="all"),
    "step inplace": JepaConfig(mode="step-jepa", layout="inplace", predictors=2, pairs="all"),
    "regular": JepaConfig(mode="regular"),
}
WAYS: dict[str, dict[str, Any]] = {
    "one row": {"row_length": 10**4},
    "rows of 83": {"row_length": 83},
    "shortest rows": {"row_length": 2, "pad_id": 7},
    "nothing shared": {"row_length": 150, "share_prefixes": False},
    "plain rows": {"encoding": "rows"},
    "segments": {"kernel": "calls", "costs": Costs(1.0, 1.0)},
    "segments in short passes": {"kernel": "calls", "costs": Costs(1.0, 0.1, call=100.0), "pass_length": 83},
}
TERMS = Objective([LMLoss(), PromptLoss(0.3), Alignment(0.7, L2()), SemanticTube(0.2)])


def collated(tokenizer: Any, config: JepaConfig, order: Sequence[int] = (0, 1, 2), **options: Any) -> Batch:
    records = tiny.tokenized(tokenizer, config)
    return tiny.collator(tokenizer, config, prompt_labels=True, **options)(
        SampledRecord(records[index], rng_key=(0, index)) for index in order
    )


def ready(factory: ModelFactory, architecture: str = "llama") -> Any:
    model = factory(architecture).double()
    enable_trees(model, segments=True)
    return model


def same(model: Any, found: Losses, expected: Losses) -> None:
    assert found.parts.keys() == expected.parts.keys()
    for name, value in expected.parts.items():
        tiny.assert_same(found.parts[name], value, EXACT, name)
    tiny.assert_same_gradients(tiny.gradients(model, found.loss), tiny.gradients(model, expected.loss), EXACT)


@pytest.mark.sample(2)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_window", "gpt2"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_rows_of_any_kind_in_any_order(
    name: str, architecture: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    model, config = ready(tiny_model, architecture), CONFIGURATIONS[name]
    expected, shapes = collated(trained_tokenizer, config), set()
    orders = [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 0, 2), (2, 0, 1)]
    for (way, options), order in zip(WAYS.items(), orders, strict=True):
        if name == "step inplace" and way == "plain rows":
            continue
        batch = collated(trained_tokenizer, config, order, **options)
        shapes.add(batch.input_ids.shape)
        same(model, jepa_loss(model, batch, TERMS), jepa_loss(model, expected, TERMS))
    assert len(shapes) >= 3


def test_infonce_depends_on_the_batch(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """By nature: its negatives are the other pairs of the batch. Their order does not matter, their presence does."""
    config, model = CONFIGURATIONS["llm separate"], ready(tiny_model)
    objective = Objective([Alignment(1.0, InfoNCE())])

    def loss(*order: int) -> Tensor:
        with torch.no_grad():
            return jepa_loss(model, collated(trained_tokenizer, config, order), objective).loss

    assert torch.allclose(loss(2, 0, 1), loss(0, 1, 2), rtol=1e-5)
    assert max(abs(float(loss(index))) for index in range(3)) < 1e-6
    assert loss(0, 1, 2) > 0.1


@pytest.mark.parametrize("options", [{}, {"encoding": "rows"}])
def test_empty_places_take_no_part(options: dict[str, Any], tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """A batch of nothing else is zero, and reaches every parameter: no process may wait for another."""
    config = JepaConfig(
        jepa_loss_type="infonce", sigreg=0.1, variance=0.1, covariance=0.1, stp=0.1, prompt_loss_weight=0.1
    )
    model, objective = ready(tiny_model), Objective.from_config(config)
    collator = tiny.collator(trained_tokenizer, config, prompt_labels=True, **options)
    first, second, _ = map(SampledRecord, tiny.tokenized(trained_tokenizer, config))
    full, holed = (
        jepa_loss(model, collator(items), objective) for items in ([first, second], [None, first, None, second])
    )
    assert torch.equal(full.loss, holed.loss)
    losses = jepa_loss(model, collator([None, None]), objective)
    assert len(losses.parts) == 7
    assert all(float(part.detach()) == 0 for part in losses.parts.values())
    losses.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
