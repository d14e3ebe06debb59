"""A micro-batch as libraries and terms see it: a mapping with typed properties, of which only tensors are moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device

import stepjepa
import tiny
from stepjepa import Batch, JepaConfig
from stepjepa.batch.costs import Costs
from stepjepa.views.sequences import SampledRecord


def batch(tokenizer: Any, **options: Any) -> Batch:
    config = JepaConfig(pooling="mean", predictors=2, mode="llm-jepa")
    records = tiny.tokenized(tokenizer, config)
    return tiny.collator(tokenizer, config, prompt_labels=True, **options)(map(SampledRecord, records))


def tensors(of: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in of.items() if isinstance(value, torch.Tensor)}


def test_every_property_is_a_key(trained_tokenizer: Any) -> None:
    made = batch(trained_tokenizer)
    names = [name for name in made if hasattr(Batch, name)]
    assert {"input_ids", "position_ids", "head_index", "label_ids", "source_index", "num_tokens", "records"} <= {*names}
    for name in names:
        assert getattr(made, name) is made[name]
    # The others are read through `trees` and `readouts`.
    assert set(made) - set(names) == {"start", "end", "isolates"} | {
        f"{kind}_{part}" for kind in ("source", "target") for part in ("tokens", "pair", "key")
    }
    assert made.trees is not None
    assert (made.trees.start is made["start"], made.trees.end is made["end"]) == (True, True)
    for kind in ("source", "target"):
        last, tokens, pair = made.readouts(kind)  # type: ignore[arg-type]
        assert (last is made[f"{kind}_index"], tokens is made[f"{kind}_tokens"]) == (True, True)
        assert pair is made[f"{kind}_pair"]


@pytest.mark.parametrize("move", [send_to_device, Batch.to])
def test_only_tensors_are_moved_and_numbers_of_the_host_stay(move: Any, trained_tokenizer: Any) -> None:
    made = batch(trained_tokenizer, costs=Costs(1, 1))
    assert len(made.passes) > 1
    # 'non_blocking' is what Accelerate passes; without it a batch would be moved tensor by tensor by waiting copies.
    moved = move(made, torch.device("meta"), non_blocking=True)
    assert type(moved) is Batch
    for part, same in zip(moved.passes, made.passes, strict=True):
        assert {value.device.type for value in tensors(part).values()} == {"meta"}
        assert {value.device.type for value in tensors(same).values()} == {"cpu"}
        assert tensors(part).keys() == tensors(same).keys()
    assert moved.records is made.records
    assert (moved.num_tokens, moved.num_records, moved.num_without_pair) == (made.num_tokens, 3, made.num_without_pair)


def test_a_copy_to_the_device_waits_only_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = []
    before = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        passed.append(kwargs)
        return before(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    further = Batch(input_ids=torch.zeros(1, 3))
    send_to_device(Batch(input_ids=torch.zeros(2, 3), further=[further]), "cpu", non_blocking=True)
    assert passed == [{"non_blocking": True}] * 2


def test_a_copy_to_a_gpu_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = []

    def to(self: torch.Tensor, device: Any, non_blocking: bool) -> torch.Tensor:
        passed.append((torch.device(device).type, non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    for device in ("cuda", "cuda:1", torch.device("cuda"), "cpu"):
        Batch(input_ids=torch.zeros(2, 3)).to(device)
    assert passed == [("cuda", True)] * 3 + [("cpu", False)]


def test_a_value_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match="label_ids: expected Tensor, got list"):
        _ = Batch(label_ids=[1, 2]).label_ids  # type: ignore[list-item]


def test_the_former_name_of_a_token_sequence_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="stepjepa.Sequence is now stepjepa.TokenSequence"):
        assert stepjepa.Sequence is stepjepa.TokenSequence
