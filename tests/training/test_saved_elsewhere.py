"""A model that a trainer saves outside of its run folder is read as it was trained."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from stepjepa import Jepa, JepaConfig, JepaTrainer, LMLoss, Objective
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main

MEAN = JepaConfig(jepa_loss_type="infonce", predictors=3, pooling="mean")
TEXTS = ["What is 3+4+5?", "Name a colour"]


def make_trainer(folder: Path, tokenizer: Any, config: JepaConfig = MEAN, **more: Any) -> JepaTrainer:
    model: Any = tiny.make_model("llama")
    arguments = tiny.arguments(folder, max_steps=1)
    data = {"train_dataset": tiny.records(), "processing_class": copy.deepcopy(tokenizer)}
    return JepaTrainer(model, arguments, config, **data, **more)


def test_its_embeddings_are_those_of_the_trained_model(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The folder knew of no JEPA objective: embedding, searching and exporting it were refused."""
    trainer = make_trainer(tmp_path / "run", tiny_tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    again = Jepa.from_pretrained(tmp_path / "final", device="cpu")
    assert again.config == MEAN
    # All records have this prompt, so that questions are read behind it.
    assert again.system_prompt == "Add."
    for side in ("source", "target"):
        trainer.bound.system_prompt = "Add."
        wanted = trainer.bound.embed(TEXTS, side=side)
        assert np.allclose(again.embed(TEXTS, side=side), wanted, atol=1e-6)


def test_a_later_save_replaces_the_record_but_not_that_of_a_run(tmp_path: Path, tiny_tokenizer: Any) -> None:
    final = tmp_path / "final"
    make_trainer(tmp_path / "a", tiny_tokenizer).save_model(str(final))
    regular = make_trainer(tmp_path / "b", tiny_tokenizer, JepaConfig(mode="regular"))
    regular.save_model(str(final))
    assert not Jepa.from_pretrained(final, device="cpu").has_objective
    regular.train()
    regular.save_model()
    record = (tmp_path / "b" / "run.json").read_bytes()
    regular.save_model(str(tmp_path / "b" / "checkpoint-best"))
    assert not (tmp_path / "b" / "checkpoint-best" / "run.json").exists()
    with pytest.raises(UserError, match="b: holds a run with other settings; name another folder"):
        make_trainer(tmp_path / "c", tiny_tokenizer).save_model(str(tmp_path / "b"))
    make_trainer(tmp_path / "d", tiny_tokenizer, JepaConfig(mode="regular")).save_model(str(tmp_path / "b"))
    assert (tmp_path / "b" / "run.json").read_bytes() == record


def test_an_objective_of_ones_own_is_named(tmp_path: Path, tiny_tokenizer: Any) -> None:
    trainer = make_trainer(tmp_path / "run", tiny_tokenizer, objective=Objective([LMLoss()]))
    trainer.save_model(str(tmp_path / "final"))
    assert "objective" in json.loads((tmp_path / "final" / "run.json").read_text())


def test_it_is_evaluated_but_is_no_run_to_report(
    tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line of ``evaluate`` named a report, which then advised to resume the run."""
    final, data = tmp_path / "final", tmp_path / "test.jsonl"
    trainer = make_trainer(tmp_path / "run", tiny_tokenizer)
    trainer.save_model(str(final))
    write_jsonl(data, [{"messages": list(record.messages)} for record in tiny.records()])
    given = ["--test_file", data, "--output_file", final / "test.jsonl", "--max_new_tokens", "2"]
    assert main(["evaluate", "--model_path", *map(str, [final, *given])]) == 0
    assert "next: " not in capsys.readouterr().out
    assert main(["report", str(final)]) == 2
    assert "final: holds a model that was saved outside of its run, by `save_model`" in capsys.readouterr().err
