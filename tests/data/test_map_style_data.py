"""Data that has no iterator of its own, or holds bare values: map-style data sets of torch, columns of ``datasets``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

import tiny
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.base.errors import UserError
from stepjepa.data.records import as_records


class Made(Dataset[dict[str, str]]):
    """Makes its items, so that none is behind the last one; it ends a test that asks on."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, str]:
        assert index < 50, "asked behind the end"
        return {"prompt": f"Twice {index}?", "completion": str(2 * index)}


class Looked(Made):
    """Looks its items up by keys, which raises no ``IndexError`` behind the last one."""

    def __getitem__(self, index: int) -> dict[str, str]:
        return {number: super(Looked, self).__getitem__(number) for number in range(5)}[index]


@pytest.mark.parametrize("kind", [Made, Looked])
def test_a_map_style_data_set_ends_where_its_length_says(kind: Callable[[], Made]) -> None:
    """It was read without end, into a temporary file, or up to a ``KeyError``."""
    assert [record.answer for record in as_records(kind())] == ["0", "2", "4", "6", "8"]
    assert [record.answer for record in as_records(Subset(kind(), [3, 1]))] == ["6", "2"]
    assert len(list(as_records(ConcatDataset([kind(), kind()])))) == 10


def test_a_trainer_trains_and_measures_one(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model: Any = tiny.make_model("llama")
    data = {"train_dataset": Made(), "eval_dataset": Looked(), "processing_class": copy.deepcopy(tiny_tokenizer)}
    trainer = JepaTrainer(model, tiny.arguments(tmp_path, max_steps=1), JepaConfig(mode="regular"), **data)
    assert len(trainer.train_dataset) == len(trainer.eval_dataset) == 5
    assert trainer.train().global_step == 1


@pytest.mark.parametrize("name", ["messages", "number"])
def test_a_column_is_no_table(name: str) -> None:
    """It ended in ``AttributeError: 'List' object has no attribute 'items'``."""
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    column = datasets.Dataset.from_list([{"messages": chat, "number": 3}])[name]
    with pytest.raises(UserError, match="<memory>:1: expected an object with the fields of a record, got"):
        list(as_records(column))
