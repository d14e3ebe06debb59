"""Invariant 1: one pass over trees gives what a pass over every sequence by itself gives, for every architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from slow_trees import Slow, logits_of, probe, random_records, random_sequences, separately
from stepjepa.batch.collate import Collator
from stepjepa.batch.costs import Costs
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.pack import pack
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import EAGER, SDPA, SEGMENTS, enable_trees
from stepjepa.models.encode import encode
from stepjepa.models.encoded import Encoded
from stepjepa.views.layouts import LAYOUTS, Layout, ReadoutOptions
from stepjepa.views.sequences import SampledRecord, TokenizedRecord, TokenSequence

ModelFactory = Callable[..., Any]
Parts = Sequence[Sequence[TokenSequence]]

CONFIGURATIONS = {
    "step branched": JepaConfig(mode="step-jepa", predictors=2, pairs="all"),
    "llm separate": JepaConfig(mode="llm-jepa", layout="separate", predictors=1),
    "llm branched": JepaConfig(mode="llm-jepa", layout="branched", predictors=1, pooling="mean"),
}
# Calls that cost nothing are one for each segment, most of them under a mask; dear ones are one for all. Where queries
# and keys cost nothing to gather, and pairs do not either, all segments run as whole paths.
SEGMENTED: dict[str, dict[str, Any]] = {
    "calls": {"kernel": "calls", "costs": Costs(1.0, 1.0)},
    "one call": {"kernel": "calls", "costs": Costs(1.0, 1.0, call=1e9)},
    "whole paths": {"kernel": "calls", "costs": Costs(1.0, 0.0, call=1.0)},
    "varlen": {"kernel": "varlen"},
}
# Plain and grouped keys, a window, values of another size than keys; the others run one form.
EVERY_FORM = ("llama", "gpt2", "gemma3_window", "minicpm3")
MODELS = [
    pytest.param(name, attention, id=f"{name}-{attention}")
    for name in tiny.ATTENTION_ONLY
    for attention in ("eager", "sdpa", *(SEGMENTED if name in EVERY_FORM else ["calls"]))
    if not (name == "gemma2_window" and attention != "eager")  # transformers refuses it: soft cap
]
# Of the other models one configuration is quick; which sequences there are is nothing that a model knows.
CASES = [
    pytest.param(*model.values, name, id=f"{model.id}-{name}", marks=[] if quick else pytest.mark.slow)
    for model in MODELS
    for name in CONFIGURATIONS
    for quick in [model.values[0] in EVERY_FORM or name == "llm separate"]
]


def sums(model: Any, batch: Batch) -> dict[str, Tensor]:
    """What terms read of a micro-batch, from the one pass."""

    def evaluate(encoded: Encoded) -> dict[str, Tensor]:
        index = batch.head_index
        source, target = encoded.pairs
        return {
            "states": encoded.at(torch.arange(batch.input_ids.numel())),
            "lm_loss": encoded.token_loss(index, batch.label_ids, batch.label_row),
            "prompt_loss": encoded.token_loss(batch.prompt_index, batch.prompt_ids, batch.prompt_row),
            "logits": encoded.logits(index),
            "source": source,
            "target": target,
        }

    return encode(model, batch, evaluate)


def scalar(found: dict[str, Tensor] | Slow, states: Tensor) -> Tensor:
    """A number that depends on all that was computed."""
    of = found if isinstance(found, dict) else vars(found)
    total = probe(states) + of["lm_loss"] + 0.3 * of["prompt_loss"]
    return total + probe(of["source"], 1) + probe(of["target"], 2)


def check(model: Any, plain: Any, batch: Batch, parts: Parts, paths: Sequence[Any]) -> None:
    """Hidden states of every sequence, logits, losses, embeddings and all gradients."""
    slow, result = separately(plain, parts), sums(model, batch)
    ours = [result["states"][torch.from_numpy(path)] for path in paths]
    for own, wanted in zip(ours, slow.states, strict=True):
        tiny.assert_same(own, wanted, what="hidden states")
    for name in ("lm_loss", "prompt_loss", "source", "target"):
        tiny.assert_same(result[name], getattr(slow, name), what=name)
    by_place = {
        place: state
        for path, states in zip(paths, slow.states, strict=True)
        for place, state in zip(path.tolist(), states, strict=True)
    }
    if len(batch.head_index):
        wanted = logits_of(plain, torch.stack([by_place[place] for place in batch.head_index.tolist()]))
        tiny.assert_same(result["logits"], wanted, what="logits")
    fast = scalar({name: value for name, value in result.items() if name != "logits"}, torch.cat(ours))
    tiny.assert_same_gradients(tiny.gradients(model, fast), tiny.gradients(plain, scalar(slow, torch.cat(slow.states))))


def segmented(model: Any, attention: str, collator: Collator) -> Collator:
    """Switch a model to trees, by the segments of one row if ``attention`` is a key of ``SEGMENTED``."""
    if attention not in SEGMENTED:
        enable_trees(model)
        assert model.config._attn_implementation == (EAGER if attention == "eager" else SDPA)
        return collator
    enable_trees(model, segments=True)
    assert model.config._attn_implementation == SEGMENTS
    return replace(collator, row_length=10**6, **SEGMENTED[attention])


def paths_of(collator: Collator, records: Sequence[TokenizedRecord]) -> tuple[Parts, list[Any]]:
    """The sequences of all records, and where packing puts them."""
    parts = [collator.sequences(SampledRecord(record)) for record in records]
    sequences = [sequence for part in parts for sequence in part]
    groups = None if collator.share_prefixes else [owner for owner, part in enumerate(parts) for _ in part]
    alone = collator.encoding != "tree"
    return parts, pack(sequences, row_length=collator.row_length, groups=groups, one_each=alone).paths


def compare(factory: ModelFactory, architecture: str, attention: str, collator: Collator, records: Any) -> Batch:
    loaded = "sdpa" if attention in SEGMENTED else attention
    plain, model = factory(architecture, loaded), factory(architecture, loaded)
    if collator.encoding == "tree":
        collator = segmented(model, attention, collator)
    batch = collator(map(SampledRecord, records))
    if attention in SEGMENTED:
        assert batch.trees is not None
        assert batch.trees.segments is not None
    check(model, plain, batch, *paths_of(collator, records))
    return batch


@pytest.mark.sample(17)
@pytest.mark.parametrize(("architecture", "attention", "name"), CASES)
def test_trees_equal_separate_passes(
    architecture: str, attention: str, name: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    config = CONFIGURATIONS[name]
    records = tiny.tokenized(trained_tokenizer, config)[:2]
    collator = tiny.collator(trained_tokenizer, config, prompt_labels=True)
    batch = compare(tiny_model, architecture, attention, collator, records)
    assert batch.trees is not None
    assert batch.num_tokens < sum(batch.records.lengths), "nothing is shared"


@pytest.mark.sample(7)
@pytest.mark.parametrize(("architecture", "attention"), MODELS)
def test_records_that_begin_alike(architecture: str, attention: str, tiny_model: ModelFactory) -> None:
    """Equal ones, ones that are equal up to the middle of the answer, prefixes: each counts once a record."""
    collator = Collator("separate", np.empty(0, np.int32), row_length=43, prompt_labels=True)
    batch = compare(tiny_model, architecture, attention, collator, random_records(3))
    assert len(batch.head_index) < len(batch.label_ids)
    assert len(batch.prompt_index) < len(batch.prompt_ids)
    assert (len(batch.input_ids) > 1) == (attention not in SEGMENTED)


@pytest.fixture
def as_they_are(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[list[TokenSequence]]], list[TokenizedRecord]]:
    """Gives records that a layout of the test turns into given sequences."""

    def make(parts: list[list[TokenSequence]]) -> list[TokenizedRecord]:
        place = lambda record, predictors, reading: parts[record.line]  # noqa: E731
        monkeypatch.setitem(LAYOUTS, "given", Layout("given", ("llm-jepa",), place=place))
        none = np.empty(0, np.int32)
        return [TokenizedRecord(none, none, line=line) for line in range(len(parts))]

    return make


# A seed differs from the others by its sequences alone.
@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4))])
@pytest.mark.parametrize("attention", ["sdpa", *SEGMENTED])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_window"])
def test_any_sequences(
    architecture: str, attention: str, seed: int, tiny_model: ModelFactory, as_they_are: Any
) -> None:
    """Branches on branches, several trees in a row, labels and readouts anywhere."""
    records = as_they_are([random_sequences(2 * seed + part, vocabulary=tiny.VOCABULARY) for part in range(2)])
    collator = Collator("given", np.empty(0, np.int32), ReadoutOptions(mean=True), row_length=29)
    compare(tiny_model, architecture, attention, collator, records)


@pytest.mark.parametrize("architecture", tiny.WITH_WINDOW)
def test_the_windows_bite(architecture: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """Guards the tests above: with sequences shorter than the window they would say nothing about windows."""
    record = tiny.tokenized(trained_tokenizer, CONFIGURATIONS["llm separate"])[0]
    model = tiny_model(architecture, "eager")
    wide = tiny_model(architecture, "eager", sliding_window=len(record.ids) + 1)
    ids = torch.from_numpy(record.ids.astype(np.int64))[None]
    with torch.no_grad():
        difference = model(ids).logits - wide(ids).logits
    assert difference[:, : tiny.WINDOW].abs().max() < 1e-5
    assert difference[:, tiny.WINDOW :].abs().max() > 0.1


OPTIONS = [(0, False, False), (0, False, True), (1, True, False), (3, False, False), (3, True, True)]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("k", "front", "reverse"), OPTIONS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_option_equals_separate_passes(
    *, name: str, k: int, front: bool, reverse: bool, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    base = CONFIGURATIONS[name]
    config = JepaConfig(
        mode=base.mode, layout=base.layout, predictors=k, pairs="all", front_pred=front, reverse_pred=reverse
    )
    records = tiny.tokenized(trained_tokenizer, config)
    compare(tiny_model, "qwen3", "sdpa", tiny.collator(trained_tokenizer, config, prompt_labels=True), records)


@pytest.mark.sample(5)
@pytest.mark.parametrize("pairs", ["first", "all"])
@pytest.mark.parametrize(
    ("architecture", "attention"),
    [("llama", "eager"), ("qwen3", "sdpa"), ("gpt2", "sdpa"), *(("qwen3", name) for name in SEGMENTED)],
)
def test_in_place_equals_a_dense_mask(
    architecture: str, attention: str, pairs: Any, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    """No plain pass gives the same numbers, so each sequence is run under its mask, written token by token."""
    config = JepaConfig(mode="step-jepa", layout="inplace", predictors=2, pairs=pairs, pooling="mean")
    records = (tiny.tokenized(trained_tokenizer, config) * 2)[:4]
    collator = tiny.collator(trained_tokenizer, config, prompt_labels=True)
    plain = tiny_model(architecture, "eager")
    model = tiny_model(architecture, "sdpa" if attention in SEGMENTED else attention)
    collator = segmented(model, attention, collator)
    batch = collator(map(SampledRecord, records))
    assert batch["isolates"]
    check(model, plain, batch, *paths_of(collator, records))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("architecture", [*tiny.RECURRENT, "gpt2", "gemma3_window"])
def test_rows_equal_separate_passes(
    architecture: str, name: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    """Padding stands on the right, where neither a state nor a convolution reaches back from."""
    config = CONFIGURATIONS[name]
    collator = tiny.collator(trained_tokenizer, config, encoding="rows", prompt_labels=True, pad_id=3)
    records = (tiny.tokenized(trained_tokenizer, config) * 2)[:4]
    batch = compare(tiny_model, architecture, "sdpa", collator, records)
    assert "position_ids" not in batch
