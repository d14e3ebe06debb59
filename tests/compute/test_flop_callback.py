"""Measuring the first steps of a run, and saving where regular epochs end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from stepjepa.batch.collate import Batch
from stepjepa.compute.equal_compute import EqualCompute
from stepjepa.compute.flop_callback import EqualComputeCallback, FlopTracker
from stepjepa.compute.flops import FlopModel
from stepjepa.config import JepaConfig
from stepjepa.training.trainer import JepaTrainer

# A layer of 5 x 7: 70 FLOPs a token, and only the weight's gradient.
FLOPS = FlopModel(token=140)


class Regular:
    """Stands in for a plan of three steps an epoch, whose regular training pays for 4 tokens a step."""

    steps_per_epoch = 3
    flops = FLOPS

    @property
    def regular(self) -> Regular:
        return self

    def keys(self, epoch: int) -> list[tuple[int, int]]:
        return [(epoch, place) for place in range(3)]

    def cost(self, keys: tuple[int, int]) -> float:
        return 4.0 * 140


PLAN: Any = Regular()


def tokens(length: int) -> Batch:
    none = torch.empty(0, dtype=torch.long)
    return Batch(input_ids=torch.zeros(1, length), head_index=none, prompt_row=none, source_index=none)


def work(tracker: FlopTracker, number: int, length: int) -> None:
    layer = torch.nn.Linear(7, 5, bias=False)
    with tracker.step(number, tokens(length)):
        layer(torch.ones(length, 7)).sum().backward()


def test_the_first_steps_are_measured_and_printed() -> None:
    lines: list[str] = []
    tracker = FlopTracker(PLAN, list, steps=2, say=lines.append)
    # Two micro-batches make the first step; it is known to be over when the next begins.
    work(tracker, 0, 4)
    work(tracker, 0, 6)
    assert not lines
    work(tracker, 1, 20)
    assert lines == ["FLOPs of step 1: 1.4000e+03 measured, 1.4000e+03 analytical, 2.500 of regular"]
    work(tracker, 2, 10)
    assert lines[1:] == [
        "FLOPs of step 2: 2.8000e+03 measured, 2.8000e+03 analytical, 5.000 of regular",
        "FLOPs per step, mean of 2: 2.1000e+03 measured, 2.1000e+03 analytical, 3.750 of regular",
    ]
    work(tracker, 3, 10)
    tracker.close()
    assert len(lines) == 3
    assert tracker.measured == [1400, 2800]


def test_a_short_run_is_printed_at_its_end_and_processes_are_added_up() -> None:
    lines: list[str] = []
    tracker = FlopTracker(PLAN, lambda values: [2 * value for value in values], say=lines.append)
    # Resumed in its second epoch.
    work(tracker, 4, 10)
    work(tracker, 5, 10)
    tracker.close()
    tracker.close()
    assert [line.split(":")[0] for line in lines] == ["FLOPs of step 5", "FLOPs of step 6", "FLOPs per step, mean of 2"]
    assert tracker.measured == [2800, 2800]


@pytest.mark.parametrize(
    ("strategies", "saved", "evaluated"),
    [
        ({"save_strategy": "epoch", "eval_strategy": "epoch"}, [1, 3, 5], [1, 3, 5]),
        ({"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}, [1, 2, 3, 4, 5], []),
        ({"save_strategy": "no", "eval_strategy": "epoch"}, [], [1, 3, 5]),
    ],
)
def test_checkpoints_stand_in_the_place_of_epochs(
    strategies: dict[str, Any], saved: list[int], evaluated: list[int], trained_tokenizer: Any, tmp_path: Path
) -> None:
    equal = EqualCompute(5, [1, 3, 5], 1.0, 1.0)
    trainer = JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(tmp_path, per_device_train_batch_size=4, max_steps=5, **strategies),
        JepaConfig(),
        train_dataset=(tiny.records() * 3)[:7],
        eval_dataset=tiny.records(),
        processing_class=copy.deepcopy(trained_tokenizer),
        callbacks=[EqualComputeCallback(equal)],
    )
    trainer.train()
    assert sorted(int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*")) == saved
    assert [line["step"] for line in trainer.state.log_history if "eval_lm_loss" in line] == evaluated
