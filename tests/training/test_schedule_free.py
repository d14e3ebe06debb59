"""Schedule-free optimizers: what is saved are the weights of evaluation, and training goes on with its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import SGD
from transformers import TrainerCallback

import tiny
from stepjepa import JepaTrainer

STEPS, SAVED = 7, 3


class Averaging(SGD):
    """SGD whose weights of evaluation are the mean of all weights so far."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group.update(train_mode=False, count=0)

    def _switch(self, *, train: bool) -> None:
        """Exchange the weights with the others that the state keeps."""
        for group in self.param_groups:
            if group["train_mode"] is not train:
                group["train_mode"] = train
                for weight in group["params"]:
                    if other := self.state[weight]:
                        other["other"], weight.data = weight.data, other["other"]

    def train(self) -> None:
        self._switch(train=True)

    def eval(self) -> None:
        self._switch(train=False)

    def step(self, closure: Any = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups)
        loss = super().step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                mean = self.state[weight].setdefault("other", torch.zeros_like(weight))
                mean.lerp_(weight.data, 1 / group["count"])
        return loss


class Means(TrainerCallback):
    """The weights of evaluation after each step, by their number; the training ends after one of them."""

    def __init__(self, last: int) -> None:
        self.after: dict[int, list[torch.Tensor]] = {}
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        others = (optimizer.state[weight]["other"] for group in optimizer.param_groups for weight in group["params"])
        self.after[state.global_step] = [other.clone() for other in others]
        control.should_training_stop |= state.global_step == self.last


def train(
    folder: Path, tokenizer: Any, resume: Path | None = None, *, last: int = STEPS, **options: Any
) -> tuple[JepaTrainer, Means]:
    model, means = tiny.make_model("llama", seed=3), Means(last)
    given: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
    optimizers = (Averaging(model.parameters(), 0.05), None)
    changes = given | options
    trainer = tiny.plain_trainer(folder, tokenizer, model, optimizers=optimizers, callbacks=[means], **changes)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, means


def is_saved(weights: list[torch.Tensor], trainer: JepaTrainer, folder: Path) -> bool:
    names = [name for name, _ in trainer.model.named_parameters()]
    saved = load_file(folder / "model.safetensors")
    return all(torch.equal(saved[name], weight) for name, weight in zip(names, weights, strict=True) if name in saved)


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": SAVED,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}


@pytest.mark.parametrize("options", [{}, EVALUATED], ids=["alone", "evaluated"])
def test_the_weights_of_evaluation_are_saved(options: dict[str, Any], tmp_path: Path, trained_tokenizer: Any) -> None:
    """Without an evaluation at that very step those of training were."""
    trainer, means = train(tmp_path, trained_tokenizer, **options)
    assert len(means.after) == STEPS
    for step in (SAVED, 2 * SAVED, STEPS):
        assert is_saved(means.after[step], trainer, tmp_path / f"checkpoint-{step}")
    assert is_saved(means.after[STEPS], trainer, tmp_path)
    assert all(map(torch.equal, trainer.model.parameters(), means.after[STEPS]))


def test_evaluations_and_saves_change_no_weight_of_training(tmp_path: Path, trained_tokenizer: Any) -> None:
    alone, often = (
        train(tmp_path / str(number), trained_tokenizer, **options)[1]
        for number, options in enumerate(({"save_strategy": "no"}, EVALUATED))
    )
    for step, weights in alone.after.items():
        assert all(map(torch.equal, weights, often.after[step]))


@pytest.mark.parametrize("options", [{}, EVALUATED], ids=["alone", "evaluated"])
def test_a_resumed_run_averages_on(options: dict[str, Any], tmp_path: Path, trained_tokenizer: Any) -> None:
    _, means = train(tmp_path / "whole", trained_tokenizer, **options)
    checkpoint = tmp_path / "whole" / f"checkpoint-{SAVED}"
    resumed, again = train(tmp_path / "resumed", trained_tokenizer, checkpoint, **options)
    for step in range(SAVED + 1, STEPS + 1):
        assert all(map(torch.equal, means.after[step], again.after[step]))
    assert is_saved(means.after[STEPS], resumed, tmp_path / "resumed")


def test_the_best_checkpoint_that_is_loaded_at_the_end_stays_as_it_was_saved(
    tmp_path: Path, trained_tokenizer: Any
) -> None:
    """A switch to the weights of evaluation behind that would replace its weights."""
    # The last step is neither evaluated nor saved.
    trainer, means = train(tmp_path, trained_tokenizer, last=SAVED + 2, **BEST)
    assert (trainer.state.best_global_step, len(means.after)) == (SAVED, SAVED + 2)
    assert is_saved(means.after[SAVED], trainer, tmp_path)
    assert all(map(torch.equal, trainer.model.parameters(), means.after[SAVED]))
