"""Optimizers, schedules and subclasses of a user's own: all that the objective adds is trained, and all is recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import tiny
from stepjepa import JepaConfig, JepaTrainer, RunConfig
from stepjepa.base.errors import UserError
from stepjepa.models.architecture import find_heads

WITH_HEAD = JepaConfig(predictor_head="linear")


def make_trainer(
    folder: Path, tokenizer: Any, model: Any, jepa: JepaConfig | None = None, *, kind: Any = JepaTrainer, **more: Any
) -> Any:
    arguments = tiny.arguments(folder, max_steps=1, per_device_train_batch_size=2)
    return kind(model, arguments, jepa, train_dataset=tiny.records(), processing_class=tokenizer, **more)


def adapted() -> Any:
    return get_peft_model(tiny.make_model("llama"), LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"]))


def trained(model: Any) -> Iterator[Any]:
    return (weight for weight in model.parameters() if weight.requires_grad)


@pytest.mark.parametrize(
    ("make", "jepa", "name"),
    [
        (lambda: tiny.make_model("llama"), WITH_HEAD, "term_heads.predictor_head.layers.0.weight"),
        (adapted, JepaConfig(), "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default"),
    ],
    ids=["head", "adapter"],
)
def test_an_optimizer_without_what_the_objective_adds_is_refused(
    make: Any, jepa: JepaConfig, name: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """Predictor heads, and the rows of predictor tokens beside an adapter, stayed as they were drawn."""
    model = make()
    optimizer = SGD(trained(model), lr=0.1)
    with pytest.raises(ValueError, match=rf"such as {name}; optimizer_cls_and_kwargs=\(SGD, .*\) makes one of all"):
        make_trainer(tmp_path, tiny_tokenizer, model, jepa, optimizers=(optimizer, None))


def test_the_class_of_an_optimizer_trains_all_and_is_recorded(tmp_path: Path, tiny_tokenizer: Any) -> None:
    passed = (SGD, {"lr": 0.07, "momentum": 0.5})
    model: Any = tiny.make_model("llama")
    trainer = make_trainer(tmp_path, tiny_tokenizer, model, WITH_HEAD, optimizer_cls_and_kwargs=passed)
    heads: Any = find_heads(model)
    before = [weight.detach().clone() for weight in heads.parameters()]
    trainer.train()
    assert not any(map(torch.equal, before, heads.parameters()))
    (launch,) = json.loads((tmp_path / "run.json").read_text())["launches"]
    assert {name: launch["settings"][name] for name in ("optim", "learning_rate")} == {
        "optim": "SGD",
        "learning_rate": 0.07,
    }
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["optimizer"]["object"] == "SGD"


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Nothing was trained, without a word."""
    optimizer = SGD(tiny.make_model("llama").parameters(), lr=0.1)
    with pytest.raises(ValueError, match="holds weights that are none of this model; make it of the parameters"):
        make_trainer(tmp_path, tiny_tokenizer, tiny.make_model("llama"), optimizers=(optimizer, None))


def test_weights_may_be_left_out_of_an_optimizer(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model: Any = tiny.make_model("llama")
    optimizer = SGD(model.model.layers[1].parameters(), lr=0.1)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    make_trainer(tmp_path, tiny_tokenizer, model, optimizers=(optimizer, None)).train()
    changed = {name for name, weight in before.items() if not torch.equal(weight, model.get_parameter(name))}
    assert changed and all(".layers.1." in name for name in changed)


def test_an_assigned_optimizer_and_a_passed_schedule_are_recorded(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The record had those of the arguments, with which nothing was trained."""
    model: Any = tiny.make_model("llama")
    trainer = make_trainer(tmp_path, tiny_tokenizer, model)
    trainer.optimizer = SGD(model.parameters(), lr=0.03)
    trainer.lr_scheduler = StepLR(trainer.optimizer, 1)
    trainer.train()
    (launch,) = json.loads((tmp_path / "run.json").read_text())["launches"]
    wanted = {"optim": "SGD", "learning_rate": 0.03, "lr_scheduler_type": "StepLR"}
    assert {name: launch["settings"][name] for name in wanted} == wanted


class Mine(JepaTrainer):
    """Makes an optimizer of its own."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


def test_a_run_of_a_subclass_can_not_be_repeated_without_it(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """``rerun`` and ``train --config run.yaml`` trained with the optimizer of the arguments."""
    make_trainer(tmp_path, tiny_tokenizer, tiny.make_model("llama"), kind=Mine).train()
    (launch,) = json.loads((tmp_path / "run.json").read_text())["launches"]
    assert launch["settings"]["optim"] == "Mine.create_optimizer"
    objects = RunConfig.read(tmp_path / "run.yaml").objects
    assert objects["trainer_class"]["object"] == "Mine"
    only = RunConfig(objects={"trainer_class": objects["trainer_class"]})
    with pytest.raises(
        UserError, match=r"trainer_class: an object of a Python program .*; only that program can train"
    ):
        only.check_required()
