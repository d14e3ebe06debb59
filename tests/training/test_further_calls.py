"""A further call of ``train`` overwrites and loses nothing of the calls before it, and is resumed as they are."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import tiny
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.base.errors import UserError
from stepjepa.store.record import read_record

STEPS = 6


class Interrupt(TrainerCallback):
    """Interrupts a call before one of its steps, as a process that is killed."""

    step: int | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


Make = Callable[..., JepaTrainer]


@pytest.fixture
def make(trained_tokenizer: Any) -> Make:
    def make_trainer(folder: Path, **options: Any) -> JepaTrainer:
        given: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
        return JepaTrainer(
            tiny.make_model("llama", seed=3),
            tiny.arguments(folder, per_device_train_batch_size=2, **given | options),
            JepaConfig(mode="regular"),
            train_dataset=tiny.records(),
            eval_dataset=tiny.records() if "eval_strategy" in options else None,
            processing_class=copy.deepcopy(trained_tokenizer),
            callbacks=[Interrupt()],
        )

    return make_trainer


def interrupted(trainer: JepaTrainer, step: int) -> None:
    """Call ``train`` once more, and interrupt it after a number of steps."""
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, Interrupt))
    callback.step = step
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    callback.step = None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def logged(folder: Path) -> list[int]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["step"] for line in lines if "lm_loss" in line]


def launches(folder: Path) -> list[tuple[int | None, int]]:
    return [(each.from_step, each.to_step) for each in read_record(folder).launches]


def test_a_further_call_that_is_interrupted_is_resumed(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last checkpoint of the first call was taken for the newest, and the run for finished."""
    whole = make(tmp_path / "whole")
    whole.train()
    first = weights(tmp_path / "whole" / "checkpoint-4")
    whole.train()
    run = make(tmp_path / "run")
    run.train()
    capsys.readouterr()
    interrupted(run, 5)
    moved = ["checkpoint-2-of-call-1", "checkpoint-4-of-call-1", "checkpoint-6-of-call-1"]
    said = capsys.readouterr().err
    assert f"note: the checkpoints of the call of train before are {', '.join(moved)} now" in said
    assert said.count("note:") == 1
    assert names(tmp_path / "run") == sorted([*moved, "checkpoint-2", "checkpoint-4"])
    assert_equal(weights(tmp_path / "run" / "checkpoint-4-of-call-1"), first)

    resumed = make(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    assert launches(tmp_path / "run") == [(0, 6), (6, 10), (10, 12)]
    for folder in ("checkpoint-2-of-call-1", "checkpoint-4", "checkpoint-6", "."):
        assert_equal(weights(tmp_path / "run" / folder), weights(tmp_path / "whole" / folder))
    assert names(tmp_path / "run") == names(tmp_path / "whole")
    assert logged(tmp_path / "run") == logged(tmp_path / "whole") == [*range(1, 2 * STEPS + 1)]
    results = [read_record(tmp_path / name).results for name in ("run", "whole")]
    assert results[0] is not None and results[1] is not None and results[0].steps == results[1].steps == 2 * STEPS
    assert read_record(tmp_path / "run").status == "finished"


def test_it_is_resumed_by_the_same_trainer_and_trained_on(make: Make, tmp_path: Path) -> None:
    run = make(tmp_path)
    run.train()
    interrupted(run, 5)
    run.train(resume_from_checkpoint=True)
    run.train()
    assert launches(tmp_path) == [(0, 6), (6, 10), (10, 12), (12, 18)]
    assert logged(tmp_path) == [*range(1, 3 * STEPS + 1)]
    calls = [f"checkpoint-{step}-of-call-{call}" for call in (1, 2) for step in (2, 4, 6)]
    assert names(tmp_path) == sorted([*calls, "checkpoint-2", "checkpoint-4", "checkpoint-6"])


def test_checkpoints_are_named_by_the_call_that_saved_them(make: Make, tmp_path: Path) -> None:
    """The second call here saves none, and its one step is part of the weights of the third."""
    run = make(tmp_path, max_steps=2)
    run.train()
    interrupted(run, 1)
    run.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-2-of-call-1"]
    run.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-2-of-call-1", "checkpoint-2-of-call-3"]
    assert launches(tmp_path) == [(0, 2), (2, 3), (3, 5), (5, 7)]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_limit_leaves_the_checkpoints_that_were_trained_last(make: Make, limit: int, tmp_path: Path) -> None:
    """It left those with the highest numbers, of the first call, and removed each new one."""
    (tmp_path / "checkpoint-2-of-call-1.bak").mkdir()
    run = make(tmp_path, save_total_limit=limit)
    run.train()
    interrupted(run, 5)
    by_time = [*(f"checkpoint-{step}-of-call-1" for step in (2, 4, 6)), "checkpoint-2", "checkpoint-4"]
    assert names(tmp_path) == sorted([*by_time[-limit:], "checkpoint-2-of-call-1.bak"])


def test_a_further_call_without_a_checkpoint_is_resumed_at_the_end_of_the_call_before_and_says_so(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path)
    run.train()
    last = weights(tmp_path)
    interrupted(run, 1)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    said = "the call of train that began at step 6 had saved no checkpoint: checkpoint-6 of the call before is resumed"
    assert said in capsys.readouterr().out
    assert_equal(weights(tmp_path), last)
    assert launches(tmp_path) == [(0, 6), (6, 6), (6, 6)]
    # It can be repeated.
    resumed.train()
    assert launches(tmp_path)[-1] == (6, 12)
    assert names(tmp_path) == sorted(f"checkpoint-{step}{of}" for step in (2, 4, 6) for of in ("", "-of-call-1"))


def test_a_checkpoint_of_an_earlier_call_is_resumed_in_another_folder_alone(make: Make, tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 1e-3}
    run = make(tmp_path / "run", **best)
    run.train()
    run.train()
    older = tmp_path / "run" / "checkpoint-4-of-call-1"
    with pytest.raises(UserError, match=r"checkpoint-4-of-call-1: is of an earlier call of train; name another"):
        make(tmp_path / "run", **best).train(resume_from_checkpoint=str(older))
    other = make(tmp_path / "other", **best)
    other.train(resume_from_checkpoint=str(older))
    assert launches(tmp_path / "other") == [(4, 6)]
    # The best one so far is that of its own call.
    assert other.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-2-of-call-1")
    assert_equal(weights(tmp_path / "other"), weights(tmp_path / "run" / "checkpoint-2-of-call-1"))
