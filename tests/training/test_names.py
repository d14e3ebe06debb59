"""``JepaTrainer`` takes names for model and data, finds the tokenizer, and takes views of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepjepa import JepaConfig, JepaTrainer
from stepjepa.base.files import write_jsonl
from tiny import arguments

ROWS = [{"prompt": f"{a} and {a}", "completion": f"{2 * a}", "id": a} for a in range(11)]


def test_names_of_model_and_data_are_enough_and_views_may_be_given(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    trainer = JepaTrainer(
        "preset:tiny",
        arguments(tmp_path / "run", max_steps=1),
        JepaConfig(pairs="all"),
        train_dataset=str(tmp_path / "rows.jsonl"),
        views=lambda record: [(str(record.extra["id"]), record.answer), ("two", "pairs")],
    )
    trainer.train()
    assert trainer.prepared is not None
    assert trainer.prepared.counts["pairs"] == 22
    trainer.save_model()
    again = JepaTrainer(str(tmp_path / "run"), arguments(tmp_path / "next", max_steps=1), train_dataset=ROWS)
    assert again.processing_class.get_vocab() == trainer.processing_class.get_vocab()
    own = JepaTrainer(again.model, arguments(tmp_path / "own", max_steps=1), train_dataset=ROWS)
    assert own.processing_class.get_vocab() == trainer.processing_class.get_vocab()


def test_views_are_of_llm_jepa(tmp_path: Path) -> None:
    config = JepaConfig(mode="step-jepa")
    with pytest.raises(ValueError, match="expected mode 'llm-jepa'"):
        JepaTrainer("preset:tiny", arguments(tmp_path), config, train_dataset=ROWS, views=lambda record: [])


def test_a_preset_needs_records_for_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_dataset: expected records to train the tokenizer of 'preset:tiny'"):
        JepaTrainer("preset:tiny", arguments(tmp_path), eval_dataset=ROWS)
