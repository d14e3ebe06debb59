"""What steps cost before they are run: the schedule of a real run, equal compute, loss dropout."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.training.flops import FlopModel, Shape
from stepjepa.training.plan import (
    EqualCompute,
    EqualComputeCallback,
    FlopTracker,
    Plan,
    equal_compute,
    equal_steps,
)
from stepjepa.training.trainer import JepaTrainer


def records(count: int) -> list[Any]:
    """Of many lengths; every third has no Step-JEPA pair."""
    made = []
    for index in range(count):
        steps = [f"{index} + {number} = {index + number}" + "." * (index % 7) for number in range(1 + index % 3)]
        made.append(
            tiny.make_record("Add.", f"What is {index}" + "?" * (index % 11), "\n\n".join(steps), line=index + 1)
        )
    return made


def shapes(plan: Plan, keys: Any) -> list[Shape]:
    """The shape of each micro-batch of a step."""
    return list(map(Shape.of, plan.micro_batches(keys)))


class Watched(JepaTrainer):
    """Writes down the shapes of the micro-batches of every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: dict[int, list[Shape]] = {}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.steps.setdefault(self.state.global_step, []).append(Shape.of(inputs))
        return super().training_step(model, inputs, num_items_in_batch)


def trainer(
    tokenizer: Any,
    folder: Path,
    config: dict[str, Any],
    count: int,
    **arguments: Any,
) -> Watched:
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "max_steps": -1,
    }
    return Watched(
        tiny.make_model("llama", seed=3),
        tiny.arguments(folder, **defaults | arguments),
        JepaConfig(**config),
        train_dataset=records(count),
        processing_class=copy.deepcopy(tokenizer),
    )


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "half of the steps": ({"mode": "step-jepa", "jepa_ratio": 0.5}, {}),
    "unshared": ({"mode": "llm-jepa", "share_prefixes": False, "row_length": 83, "prompt_loss_weight": 0.3}, {}),
    "infonce": ({"mode": "llm-jepa", "jepa_loss_type": "infonce", "jepa_ratio": 0.5}, {}),
    "the first epoch and a half": ({"mode": "llm-jepa", "jepa_epochs": 1.5}, {}),
    "rows": ({"mode": "llm-jepa", "encoding": "rows", "jepa_ratio": 0.7}, {}),
    "in place": ({"mode": "step-jepa", "layout": "inplace"}, {"gradient_accumulation_steps": 1}),
    "in the file's order": ({"mode": "step-jepa"}, {"train_sampling_strategy": "sequential", "data_seed": 5}),
    "regular": ({"mode": "regular"}, {"per_device_train_batch_size": 5}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_of_a_real_run(name: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    config, arguments = RUNS[name]
    # The last step of an epoch is not full, nor is its last micro-batch.
    run = trainer(trained_tokenizer, tmp_path, config, 19, **arguments)
    plan = run.plan
    run.train()
    expected = [shapes(plan, keys) for epoch in (0, 1) for keys in plan.keys(epoch)]
    assert len(expected) == 2 * plan.steps_per_epoch == len(run.steps)
    assert [run.steps[number] for number in range(len(expected))] == expected
    assert any(shape.pairs for step in expected for shape in step) == run.jepa.uses_views
    costs = list(itertools.islice(plan.costs(), len(expected)))
    assert costs == [sum(map(plan.flops.of_shape, step)) for step in expected]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mode", "loss"), [("llm-jepa", "infonce"), ("step-jepa", "cosine")])
def test_regular_plan_is_that_of_a_regular_run(mode: str, loss: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    config = {"mode": mode, "jepa_ratio": 0.5, "jepa_loss_type": loss}
    regular = trainer(trained_tokenizer, tmp_path, {"mode": "regular"}, 19).plan
    own = trainer(trained_tokenizer, tmp_path, config, 19).plan
    for epoch in range(3):
        steps = [[shapes(plan, keys) for keys in plan.keys(epoch)] for plan in (own.regular, regular)]
        assert steps[0] == steps[1]
    assert own.regular.budgets(1.5) == regular.budgets(1.5)


@pytest.mark.parametrize("seed", range(3))
def test_equal_steps_against_trying_every_number(seed: int) -> None:
    generator = np.random.default_rng(seed)
    costs = generator.integers(50, 150, 400).astype(float).tolist()
    budgets = np.cumsum(generator.integers(300, 4000, 5)).astype(float).tolist()
    result = equal_steps(iter(costs), budgets)
    sums = [0.0, *itertools.accumulate(costs)]
    best = [min(range(1, len(sums)), key=lambda steps: abs(sums[steps] - budget)) for budget in budgets]
    assert result.checkpoints == best
    assert result.steps == best[-1]
    assert result.flops == sums[best[-1]]
    assert result.regular_flops == budgets[-1]
    assert f"{result.steps} steps" in result.describe()


@pytest.mark.slow
def test_same_compute_as_the_regular_run_measured(trained_tokenizer: Any, tmp_path: Path) -> None:
    config = {"mode": "step-jepa", "pairs": "all", "jepa_ratio": 0.5}
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    measured = []
    equal = equal_compute(trainer(trained_tokenizer, tmp_path, config, 40, **arguments).plan, 1)
    for chosen, steps in (({"mode": "regular"}, -1), (config, equal.steps)):
        run = trainer(
            trained_tokenizer, tmp_path / chosen["mode"], chosen, 40, max_steps=steps, num_train_epochs=1, **arguments
        )
        run.tracker = FlopTracker(run.flops, run.total, lambda line: None, steps=1000)
        run.train()
        run.tracker.close()
        measured.append(run.tracker.measured)
        predicted = list(itertools.islice(run.plan.costs(), len(measured[-1])))
        # The loss and the monitors are counted, but not derived.
        assert measured[-1] == pytest.approx(predicted, rel=0.01)
    assert (len(measured[0]), len(measured[1])) == (20, equal.steps)
    # A run has whole steps, so it may be half a step away.
    assert sum(measured[1]) == pytest.approx(sum(measured[0]), abs=0.6 * max(measured[1]))
    assert equal.regular_flops == pytest.approx(sum(measured[0]), rel=0.01)
    assert equal.checkpoints[-1] == equal.steps


# -- measuring, and saving where regular epochs end ------------------------------------------------------------------

# A layer of 5 x 7: 70 FLOPs a token, and only the weight's gradient.
LAYER = FlopModel(token=140)


def tokens(length: int) -> Batch:
    none = torch.empty(0, dtype=torch.long)
    return Batch(input_ids=torch.zeros(1, length), head_index=none, prompt_index=none, source_index=none)


def work(tracker: FlopTracker, number: int, length: int) -> None:
    layer = torch.nn.Linear(7, 5, bias=False)
    with tracker.micro_batch(number, tokens(length)):
        layer(torch.ones(length, 7)).sum().backward()


def test_the_first_steps_are_measured_and_printed() -> None:
    lines: list[str] = []
    tracker = FlopTracker(LAYER, lambda values: [2 * value for value in values], lines.append, steps=2)
    # Two micro-batches make the first step, of a run that is resumed; it is known to be over when the next begins.
    work(tracker, 4, 4)
    work(tracker, 4, 6)
    assert not lines
    work(tracker, 5, 20)
    tracker.close()
    work(tracker, 6, 10)
    tracker.close()
    assert lines == [f"FLOPs of step {n}: {f:.4e} measured, {f:.4e} analytical" for n, f in ((5, 2800), (6, 5600))]
    assert tracker.measured == [2800, 5600]


@pytest.mark.sample(1)
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
    run = JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(tmp_path, per_device_train_batch_size=4, max_steps=5, **strategies),
        JepaConfig(),
        train_dataset=(tiny.records() * 3)[:7],
        eval_dataset=tiny.records(),
        processing_class=copy.deepcopy(trained_tokenizer),
        callbacks=[EqualComputeCallback(equal)],
    )
    run.train()
    assert sorted(int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*")) == saved
    assert [line["step"] for line in run.state.log_history if "eval_lm_loss" in line] == evaluated
