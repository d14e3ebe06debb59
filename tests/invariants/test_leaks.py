"""Invariant 3: what must not be seen changes nothing when it is changed; what must be seen changes something."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.attention import enable_forest

ModelFactory = Callable[..., Any]

MODELS = [("llama", "sdpa"), ("llama", "eager"), ("gemma2_window", "eager"), ("qwen2_window", "sdpa"), ("gpt2", "sdpa")]
each_model = pytest.mark.parametrize(("architecture", "attention"), MODELS)

# Sums over more keys may round differently where masked ones change; nothing larger than that may be seen.
SILENT = 1e-6
HEARD = 1e-4


class Subject:
    """A forest under a model, asked what changes when some of its tokens do."""

    def __init__(self, model: Any, forest: Forest, encoding: str = "forest") -> None:
        self.model, self.forest, self.encoding = model, forest, encoding
        if encoding == "forest":
            enable_forest(model)
        self.before = self._run(forest)

    def _run(self, forest: Forest) -> Tensor:
        with torch.no_grad():
            return tiny.forest_states(self.model, forest)

    def change(self, tokens: Iterable[int]) -> Tensor:
        """``[T]``: how much each token's hidden state moves when the ids of these tokens change."""
        ids = self.forest.input_ids.copy()
        chosen = np.asarray(list(tokens))
        ids[chosen] = (ids[chosen] + 7) % tiny.VOCABULARY
        return (self._run(replace(self.forest, input_ids=ids)) - self.before).abs().amax(-1)


def subject(
    factory: ModelFactory, architecture: str, attention: str, tokenizer: Any, **options: Any
) -> tuple[Subject, Forest]:
    forest = ForestBuilder(tokenizer, JepaConfig(**options)).build(tiny.records())[0]
    return Subject(factory(architecture, attention), forest), forest


@each_model
def test_step_branched(architecture: str, attention: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    tested, forest = subject(
        tiny_model, architecture, attention, trained_tokenizer, mode="step-jepa", predictors=2, pairs="all"
    )
    main, *others = forest.segments
    branches = [s for s in others if s.kind == "source"]
    roots = [s for s in others if s.kind == "target"]
    assert len(branches) == len(roots) == 3

    for own in [*branches, *roots]:
        moved = tested.change(range(own.start, own.end))
        outside = np.ones(len(forest), bool)
        outside[own.start : own.end] = False
        assert moved[outside].max() <= SILENT, f"{own.kind} is seen from outside"
        assert moved[own.end - 1] > HEARD, f"{own.kind} does not see itself"

    for branch in branches:
        moved = tested.change(range(branch.attachment, main.end))
        assert moved[branch.start : branch.end].max() <= SILENT, "a branch sees what follows its step"
        moved = tested.change([branch.attachment - 1])
        assert moved[branch.start : branch.end].min() > HEARD, "a branch does not see the end of its step"

    moved = tested.change(range(main.start, main.end))
    for root in roots:
        assert moved[root.start : root.end].max() <= SILENT, "a root sees the main text"
    for branch in branches:
        assert moved[branch.start : branch.end].min() > HEARD


@each_model
@pytest.mark.parametrize("layout", ["separate", "branched"])
def test_llm(layout: str, architecture: str, attention: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    tested, forest = subject(
        tiny_model, architecture, attention, trained_tokenizer, mode="llm-jepa", layout=layout, predictors=2
    )
    main, source, target = forest.segments
    for own, others in [(main, [target]), (source, [main, target]), (target, [main, source])]:
        moved = tested.change(range(own.start, own.end))
        for other in others:
            assert moved[other.start : other.end].max() <= SILENT, f"{other.kind} sees {own.kind}"
        assert moved[own.end - 1] > HEARD
    moved = tested.change(range(main.start, main.end))[source.start : source.end]
    if layout == "separate":
        assert moved.max() <= SILENT
    else:
        assert moved.min() > HEARD
        moved = tested.change(range(source.attachment, main.end))
        assert moved[source.start : source.end].max() <= SILENT, "the source sees the answer"


@each_model
def test_inplace(architecture: str, attention: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    tested, forest = subject(
        tiny_model, architecture, attention, trained_tokenizer, mode="step-jepa", layout="inplace", predictors=2
    )
    first, source, target, rest = forest.segments
    assert [s.kind for s in forest.segments] == ["main", "source", "target", "main"]
    moved = tested.change(range(target.start))
    assert moved[target.start : target.end].max() <= SILENT, "the target step sees what predicts it"
    assert moved[source.start : source.end].min() > HEARD
    moved = tested.change(range(target.start, len(forest)))
    assert moved[: target.start].max() <= SILENT, "the source sees what it predicts"
    assert moved[target.end - 1] > HEARD
    if architecture in ("llama", "gpt2"):  # no window: what follows sees the whole row
        for segment in (first, source, target):
            moved = tested.change([segment.start])
            assert moved[rest.start : rest.end].min() > SILENT, f"step 3 does not see {segment.kind}"


@each_model
def test_causality_in_the_main_text(
    architecture: str, attention: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    tested, forest = subject(tiny_model, architecture, attention, trained_tokenizer, mode="step-jepa", pairs="all")
    end = forest.segments[0].end
    for token in range(0, end, 5):
        moved = tested.change([token])
        assert moved[:token].max() <= SILENT if token else True
        assert moved[token] > HEARD


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_token_by_token(seed: int, tiny_model: ModelFactory) -> None:
    """One layer, so that influence is visibility: a token moves exactly those that see it by the definition."""
    forest = tiny.random_forest(seed)
    tested = Subject(tiny_model("llama", num_hidden_layers=1), forest)
    visible = tiny.dense_mask(forest)
    for token in range(len(forest)):
        moved = tested.change([token])
        hidden = moved[~visible[:, token]]
        assert not hidden.numel() or hidden.max() <= SILENT
        assert moved[visible[:, token]].min() > SILENT


@pytest.mark.parametrize("encoding", ["forest", "rows"])
def test_records_of_a_batch_do_not_see_each_other(
    encoding: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    config = JepaConfig(mode="llm-jepa", layout="separate", predictors=2)
    forests = ForestBuilder(trained_tokenizer, config).build(tiny.records())
    model = tiny_model("llama")
    if encoding == "forest":
        enable_forest(model)

    def run(padding: int, other: int) -> tuple[dict[str, Tensor], Tensor]:
        changed = [forests[0], *(replace(f, input_ids=(f.input_ids + other) % tiny.VOCABULARY) for f in forests[1:])]
        batch = ForestCollator(padding, encoding)(changed)
        with torch.no_grad():
            return batch, tiny.hidden_states(model, batch).flatten(0, 1)

    batch, before = run(0, 0)
    sources, targets, labels = (batch[key].tolist() for key in ("source_index", "target_index", "label_index"))
    own = [sources[0], targets[0], *labels[: int((forests[0].shift_labels != IGNORE).sum())]]
    everyone = [*sources, *targets, *labels]
    _, after = run(0, 5)
    assert (after - before)[own].abs().max() <= SILENT
    assert (after - before)[everyone].abs().max() > HEARD
    _, after = run(5, 0)
    assert (after - before)[everyone].abs().max() <= SILENT, "padding is seen"
    assert (after - before).abs().max() > HEARD, "nothing is padded"
