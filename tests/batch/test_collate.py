"""Micro-batches: labels, prompts and readouts of every record, wherever packing has put their tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.views.layouts import LAYOUTS
from stepjepa.views.sequences import SampledRecord, TokenSequence

CONFIGURATIONS = {
    "regular": JepaConfig(mode="regular"),
    "separate": JepaConfig(mode="llm-jepa", predictors=2),
    "branched": JepaConfig(mode="llm-jepa", layout="branched", pooling="mean"),
    "steps": JepaConfig(mode="step-jepa", pairs="all", predictors=2),
    "in place": JepaConfig(mode="step-jepa", layout="inplace", pairs="all", predictors=2, pooling="mean"),
}
ENCODINGS = [
    {"encoding": "tree", "row_length": 61},
    {"encoding": "tree", "row_length": 500},
    {"encoding": "tree", "row_length": 61, "share_prefixes": False},
    {"encoding": "rows"},
]
CASES = [
    (name, options) for name in CONFIGURATIONS for options in ENCODINGS if name != "in place" or "row_length" in options
]


def seen(batch: Batch, place: int) -> tuple[tuple[int, int], ...]:
    """What decides a hidden state: the tokens that a flat position sees, with their positions."""
    ids = batch.input_ids
    row, column = divmod(place, ids.shape[1])
    if batch.trees is not None:
        start, end, positions = batch["start"][row], batch["end"][row], batch.position_ids[row]
        keys = [key for key in range(int(start[column]), column + 1) if column < end[key]]
    else:
        keys, positions = list(range(column + 1)), torch.arange(ids.shape[1])
    return tuple((int(ids[row, key]), int(positions[key])) for key in keys)


def own(sequence: TokenSequence, place: int) -> tuple[tuple[int, int], ...]:
    """The same of a token of a sequence."""
    first = 0 if sequence.start is None else int(sequence.start[place])
    return tuple((int(sequence.ids[key]), key) for key in range(first, place + 1))


@pytest.mark.sample(7)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_everything_is_where_it_belongs(name: str, options: dict[str, Any], trained_tokenizer: Any) -> None:
    """Each label, prompt label and readout of each record, with all that its position sees; shared or not."""
    records = tiny.tokenized(trained_tokenizer, CONFIGURATIONS[name], (tiny.records() * 2)[:5])
    collator = tiny.collator(trained_tokenizer, CONFIGURATIONS[name], prompt_labels=True, **options)
    items = [SampledRecord(record, rng_key=(3, index)) for index, record in enumerate(records)]
    batch = collator([None, *items, None])
    parts = [collator.sequences(item) for item in items]

    for kind, field, index in (("label", "labels", batch.head_index), ("prompt", "prompt", batch.prompt_index)):
        at = index[batch[f"{kind}_row"]].tolist()
        result = Counter(
            (seen(batch, place), token) for place, token in zip(at, batch[f"{kind}_ids"].tolist(), strict=True)
        )
        wanted = Counter(
            (own(sequence, int(place)), int(token))
            for part in parts
            for sequence in part
            for place, token in getattr(sequence, field)
        )
        assert result == wanted
        assert sum(result.values()) == sum(len(getattr(record, field)) for record in records)
        assert len(set(index.tolist())) == len(index), "the head runs twice for a position"

    for kind in ("source", "target"):
        tokens = {
            (owner, readout.pair): [own(sequence, place) for place in range(readout.start, readout.end)]
            for owner, part in enumerate(parts)
            for sequence in part
            for readout in sequence.readouts
            if readout.kind == kind
        }
        wanted_tokens = [tokens[key] for key in sorted(tokens)]
        assert [seen(batch, place) for place in batch[f"{kind}_index"].tolist()] == [each[-1] for each in wanted_tokens]
        if any(len(each) > 1 for each in wanted_tokens):
            averaged: list[list[Any]] = [[] for _ in wanted_tokens]
            for place, pair in zip(batch[f"{kind}_tokens"].tolist(), batch[f"{kind}_pair"].tolist(), strict=True):
                averaged[pair].append(seen(batch, place))
            assert averaged == wanted_tokens
        else:
            assert f"{kind}_tokens" not in batch
    assert batch.pairs == sum(len(record.pairs) for record in records)

    members = batch.records
    assert len(members.paths) == len(records)
    flat = batch.input_ids.flatten().numpy()
    for record, path in zip(records, members.paths, strict=True):
        assert flat[path].tolist() == record.ids.tolist()
    assert bool(batch.get("isolates")) == (name == "in place")
    starts = batch["start"].flatten().numpy() if name == "in place" else np.zeros(len(flat))
    assert [isolated.tolist() for isolated in members.isolated] == [
        np.flatnonzero(starts[path] > 0).tolist() for path in members.paths
    ]
    assert members.rng_keys == tuple((3, index) for index in range(len(records)))
    assert members.lines == tuple(record.line for record in records)
    for kind in ("labels", "prompt"):
        places = [each.tolist() for each in getattr(members, kind)]
        assert places == [getattr(record, kind).tolist() for record in records]
    assert members.lengths == tuple(sum(map(len, part)) for part in parts)
    assert members.plain_tokens == sum(len(record.ids) for record in records)
    assert (batch.num_records, batch.num_without_pair) == (5, sum(not record.pairs for record in records))


def test_a_layout_may_place_sources_and_targets_in_different_orders(
    trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def targets_backwards(*given: Any) -> list[TokenSequence]:
        main, *views = LAYOUTS["branched"].place(*given)
        return [main, *views[::2], *views[-1::-2]]

    monkeypatch.setitem(LAYOUTS, "backwards", replace(LAYOUTS["branched"], place=targets_backwards))
    items = [SampledRecord(record) for record in tiny.tokenized(trained_tokenizer, CONFIGURATIONS["steps"])]
    assert max(len(item.record.pairs) for item in items) > 1
    collator = tiny.collator(trained_tokenizer, CONFIGURATIONS["steps"])
    keys = replace(collator, layout="backwards")(items).pair_keys
    assert torch.equal(keys, collator(items).pair_keys)
    assert len({tuple(key) for key in keys.tolist()}) == len(keys)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tokens_are_counted_without_padding(name: str, trained_tokenizer: Any) -> None:
    pad = tiny.VOCABULARY - 1
    batch = tiny.batch_of(trained_tokenizer, CONFIGURATIONS[name], tiny.records()[:2], pad_id=pad, row_length=2)
    real = int((batch.input_ids != pad).sum())
    assert real < batch.input_ids.numel(), "nothing is padded"
    assert batch.num_tokens == real
    assert not len(batch.prompt_ids) and not len(batch.prompt_index), "nobody asked for prompt labels"


def test_sequences_beyond_the_models_positions_are_refused(trained_tokenizer: Any) -> None:
    config = CONFIGURATIONS["separate"]
    record = tiny.tokenized(trained_tokenizer, config)[0]
    limit = max(map(len, tiny.collator(trained_tokenizer, config).sequences(SampledRecord(record))))
    # A row may be longer than the model's positions, a sequence may not.
    batch = tiny.collator(trained_tokenizer, config, positions=limit, row_length=10**4)([SampledRecord(record)])
    assert batch.input_ids.shape[1] > limit
    message = f"at most {limit - 1} tokens .*, got {limit} in line 1; set max_length to {limit - 1} or less"
    with pytest.raises(ValueError, match=message):
        tiny.collator(trained_tokenizer, config, positions=limit - 1)([SampledRecord(record)])
