"""A resumed run has the weights of an uninterrupted one, whatever optimizer and schedule keep in parameter groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR
from transformers import TrainerCallback

import tiny
from stepjepa import JepaTrainer

STEPS, SAVED = 7, 3
RATE = 0.01


class Counting(SGD):
    """SGD whose rate falls with a counter that it keeps in its groups, as schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float, **options: Any) -> None:
        super().__init__(parameters, lr, momentum=0.5, **options)
        for group in self.param_groups:
            group.update(count=0, weights=[1.0])

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["count"] += 1
            group["weights"].append(sum(group["weights"]))
            group["lr"] /= group["count"] * group["weights"][-1]
        loss = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return loss


class Groups(TrainerCallback):
    """The first group of the optimizer at the beginning of each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_step_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.seen.append({name: copy.copy(value) for name, value in optimizer.param_groups[0].items()})


Make = Callable[[Any], tuple[Any, Any]]
"""Makes an optimizer and its schedule for a model."""


def make_trainer(folder: Path, tokenizer: Any, make: Make | None = None, **options: Any) -> tuple[JepaTrainer, Groups]:
    model, observed = tiny.make_model("llama", seed=3), Groups()
    given: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "learning_rate": RATE}
    optimizers = (None, None) if make is None else make(model)
    changes = given | options
    trainer = tiny.plain_trainer(folder, tokenizer, model, optimizers=optimizers, callbacks=[observed], **changes)
    return trainer, observed


def assert_resumed_equals_uninterrupted(folder: Path, tokenizer: Any, make: Make | None = None, **options: Any) -> None:
    whole, groups = make_trainer(folder / "whole", tokenizer, make, **options)
    whole.train()
    resumed, later = make_trainer(folder / "resumed", tokenizer, make, **options)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{SAVED}"))
    for seen, again in zip(groups.seen[SAVED:], later.seen, strict=True):
        assert {**seen, "params": None} == {**again, "params": None}
    for (name, value), same in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(value, same), name


def counting(model: Any, **options: Any) -> tuple[Any, Any]:
    return Counting(model.parameters(), RATE, **options), None


def one_cycle(model: Any, *, rate: float = RATE, decay: float = 0.0) -> tuple[Any, Any]:
    optimizer = AdamW(model.parameters(), rate, weight_decay=decay)
    return optimizer, OneCycleLR(optimizer, rate, total_steps=STEPS)


@pytest.mark.parametrize("make", [counting, one_cycle])
def test_what_an_optimizer_keeps_in_its_groups_is_resumed(make: Make, tmp_path: Path, trained_tokenizer: Any) -> None:
    """The groups of a new optimizer, counters and cycled momentum among them, replaced those of the checkpoint."""
    assert_resumed_equals_uninterrupted(tmp_path, trained_tokenizer, make)


def test_a_changed_setting_is_applied_beside_what_is_resumed(tmp_path: Path, trained_tokenizer: Any) -> None:
    make_trainer(tmp_path, trained_tokenizer, counting)[0].train()
    checkpoint = str(tmp_path / f"checkpoint-{SAVED}")
    run, groups = make_trainer(tmp_path / "decay", trained_tokenizer, lambda model: counting(model, weight_decay=0.3))
    run.train(resume_from_checkpoint=checkpoint)
    assert [(seen["count"], seen["weight_decay"]) for seen in groups.seen] == [(3, 0.3), (4, 0.3), (5, 0.3), (6, 0.3)]
    # It stays applied in a launch that begins with it, and is taken back by one that does not.
    for decay in (0.3, 0.0):
        folder = tmp_path / "decay"
        run, groups = make_trainer(
            folder / str(decay), trained_tokenizer, lambda model, decay=decay: counting(model, weight_decay=decay)
        )
        run.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
        assert [(seen["count"], seen["weight_decay"]) for seen in groups.seen] == [(6, decay)]


def test_a_schedule_that_keeps_its_rate_is_resumed_with_another_decay_and_with_no_other_rate(
    tmp_path: Path, trained_tokenizer: Any
) -> None:
    whole, cycled = make_trainer(tmp_path, trained_tokenizer, one_cycle)
    whole.train()
    checkpoint = str(tmp_path / f"checkpoint-{SAVED}")
    run, groups = make_trainer(tmp_path / "decay", trained_tokenizer, lambda model: one_cycle(model, decay=0.3))
    run.train(resume_from_checkpoint=checkpoint)
    kept = ("lr", "betas")
    assert [[seen[name] for name in kept] for seen in groups.seen] == [
        [seen[name] for name in kept] for seen in cycled.seen[SAVED:]
    ]
    assert {seen["weight_decay"] for seen in groups.seen} == {0.3}
    run, _ = make_trainer(tmp_path / "rate", trained_tokenizer, lambda model: one_cycle(model, rate=0.05))
    with pytest.raises(ValueError, match=r"expected the learning rate 0.0004 of the .* schedule keeps; got 0.002"):
        run.train(resume_from_checkpoint=checkpoint)


def test_a_further_call_that_is_resumed_keeps_the_counters_of_both_calls(
    tmp_path: Path, trained_tokenizer: Any
) -> None:
    """The optimizer of a further call begins where the first call left it."""
    whole, groups = make_trainer(tmp_path / "whole", trained_tokenizer, counting)
    whole.train()
    whole.train()
    resumed, later = make_trainer(tmp_path / "resumed", trained_tokenizer, counting)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{SAVED}"))
    assert [seen["count"] for seen in later.seen] == [seen["count"] for seen in groups.seen[STEPS + SAVED :]]
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


def of_an_earlier_version(checkpoint: Path) -> str:
    """A checkpoint without the settings with which its launch began."""
    file = checkpoint / "log_line_0.pt"
    torch.save({name: value for name, value in torch.load(file).items() if name != "start_settings"}, file)
    (checkpoint / "checksums.json").unlink()
    return str(checkpoint)


def test_a_checkpoint_of_an_earlier_version_is_resumed_with_the_hyperparameters_of_this_launch(
    tmp_path: Path, trained_tokenizer: Any
) -> None:
    make_trainer(tmp_path, trained_tokenizer, counting)[0].train()
    checkpoint = of_an_earlier_version(tmp_path / f"checkpoint-{SAVED}")
    run, groups = make_trainer(tmp_path / "run", trained_tokenizer, lambda model: counting(model, weight_decay=0.3))
    run.train(resume_from_checkpoint=checkpoint)
    assert [(seen["count"], seen["weight_decay"]) for seen in groups.seen] == [(3, 0.3), (4, 0.3), (5, 0.3), (6, 0.3)]


# Held-out losses that no step beats: the rate is reduced from the second evaluation on.
PLATEAU: dict[str, Any] = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 1e3, "threshold_mode": "abs"},
}
GREEDY: dict[str, Any] = {
    "lr_scheduler_type": "greedy",
    "lr_scheduler_kwargs": {**PLATEAU["lr_scheduler_kwargs"], "min_lr": 1e-5},
}
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}


@pytest.mark.parametrize("schedule", [PLATEAU, GREEDY], ids=["plateau", "greedy"])
def test_a_rate_that_was_reduced_is_resumed(schedule: dict[str, Any], tmp_path: Path, trained_tokenizer: Any) -> None:
    """It was taken for another learning rate than that of the launch before, so that the resume was refused."""
    options = {**EVALUATED, **schedule}
    assert_resumed_equals_uninterrupted(tmp_path, trained_tokenizer, **options)


def test_a_reduced_rate_of_an_earlier_version_is_resumed(tmp_path: Path, trained_tokenizer: Any) -> None:
    make_trainer(tmp_path, trained_tokenizer, **EVALUATED, **PLATEAU)[0].train()
    checkpoint = of_an_earlier_version(tmp_path / f"checkpoint-{SAVED}")
    run, groups = make_trainer(tmp_path / "run", trained_tokenizer, **EVALUATED, **PLATEAU)
    run.train(resume_from_checkpoint=checkpoint)
    assert [seen["lr"] for seen in groups.seen] == [RATE / 4, RATE / 8, RATE / 16, RATE / 32]


def test_another_rate_for_a_schedule_that_reduces_its_own_is_refused(tmp_path: Path, trained_tokenizer: Any) -> None:
    make_trainer(tmp_path, trained_tokenizer, **EVALUATED, **PLATEAU)[0].train()
    run, _ = make_trainer(tmp_path / "run", trained_tokenizer, **EVALUATED, **PLATEAU | {"learning_rate": RATE / 4})
    with pytest.raises(ValueError, match=r"expected the learning rate 0.01 of the checkpoint.* keeps; got 0.0025"):
        run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))


def test_a_further_call_restores_no_line_of_logs_of_the_checkpoint_that_the_call_before_resumed(
    tmp_path: Path, trained_tokenizer: Any
) -> None:
    """Its first line began at the step of that checkpoint, and ``train_loss`` was over steps of both calls."""
    make_trainer(tmp_path, trained_tokenizer, logging_steps=2)[0].train()
    run, _ = make_trainer(tmp_path, trained_tokenizer, logging_steps=2)
    run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    run.train()
    lines = [line for line in run.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert run.resume.first_step == 0
