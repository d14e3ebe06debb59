"""What steps cost before they are run: the schedule of a real run, equal compute, loss dropout."""

from __future__ import annotations

import copy
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainingArguments

import tiny
from stepjepa.compute.equal_compute import (
    EqualCompute,
    Pass,
    Plan,
    Shape,
    Shapes,
    equal_compute,
    equal_steps,
    passes_of,
    shape_of,
)
from stepjepa.compute.flop_callback import FlopTracker
from stepjepa.compute.flop_probe import Cost
from stepjepa.compute.flops import FlopModel
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.grouping import GroupCollator
from stepjepa.training.trainer import JepaTrainer

# Attention and head weigh about as much as the rest.
FLOPS = FlopModel(Cost(token=1009, square=31, label=4001), Cost(token=2003, square=61, label=8009))


def records(count: int) -> list[Any]:
    """Of many lengths; every third has no Step-JEPA pair."""
    made = []
    for index in range(count):
        steps = [f"{index} + {number} = {index + number}" + "." * (index % 7) for number in range(1 + index % 3)]
        made.append(
            tiny.make_record("Add.", f"What is {index}" + "?" * (index % 11), "\n\n".join(steps), line=index + 1)
        )
    return made


class Watched(JepaTrainer):
    """Writes down the passes of every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: dict[int, list[Pass]] = {}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        groups = inputs["groups"]
        views = any(len(group["source_index"]) for group in groups)
        for group in groups:
            shape = Shape(*group["input_ids"].shape, len(group["label_index"]), len(group["source_index"]))
            self.steps.setdefault(self.state.global_step, []).append(Pass(shape, views))
        return super().training_step(model, inputs, num_items_in_batch)


def trainer(
    tokenizer: Any,
    folder: Path,
    config: dict[str, Any],
    count: int,
    **arguments: Any,
) -> Watched:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return Watched(
        tiny.make_model("llama", seed=3),
        TrainingArguments(str(folder), **defaults | arguments),
        JepaConfig(**config),
        train_dataset=records(count),
        processing_class=copy.deepcopy(tokenizer),
    )


@pytest.mark.parametrize("pass_cost", [None, 0, 13, 10**6])
@pytest.mark.parametrize("encoding", ["forest", "rows"])
def test_passes_are_those_of_the_collator(encoding: str, pass_cost: int | None) -> None:
    forests = [tiny.random_forest(seed, isolated=False) for seed in range(11)]
    forests += [forest.without_views() for forest in forests[:5]]
    collator = GroupCollator(ForestCollator(0, encoding), pass_cost)
    for count in (0, 1, 5, len(forests)):
        chosen = forests[len(forests) - count :]
        groups = collator([*chosen, None])["groups"]
        expected = [
            Shape(*group["input_ids"].shape, len(group["label_index"]), len(group["source_index"])) for group in groups
        ]
        found = passes_of([shape_of(forest, encoding) for forest in chosen], pass_cost)
        assert [one.shape for one in found] == expected
        assert {one.views for one in found} == {any(shape.pairs for shape in expected)}


def test_places_that_an_uneven_last_step_leaves_empty() -> None:
    # Five records, two processes with two each: the second step has one record, and a process without any.
    plan = made_up(5, batch_size=2, batches_per_step=2, processes=2, pass_cost=None)
    first, last = (plan.passes(keys) for keys in plan.keys(0))
    assert [one.shape.rows for one in first] == [2, 2]
    assert [one.shape.rows for one in last] == [1, 1]
    assert last[1] == Pass(Shape(1, 1, 0, 0), False)
    assert plan.epoch_costs(0)[1] == FLOPS.of_pass(*last[0].shape) + FLOPS.of_pass(1, 1, 0)
    assert plan.regular_costs(0)[1] < plan.epoch_costs(0)[1]


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "half of the steps": ({"mode": "step-jepa", "jepa_ratio": 0.5}, {}),
    "infonce": ({"mode": "llm-jepa", "jepa_loss_type": "infonce", "jepa_ratio": 0.5}, {}),
    "rows": ({"mode": "llm-jepa", "encoding": "rows", "jepa_ratio": 0.7}, {}),
    "in place": ({"mode": "step-jepa", "layout": "inplace"}, {"gradient_accumulation_steps": 1}),
    "grouped by length": ({"mode": "step-jepa"}, {"train_sampling_strategy": "group_by_length", "data_seed": 5}),
    "regular": ({"mode": "regular"}, {"per_device_train_batch_size": 5}),
}


@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_of_a_real_run(name: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    config, arguments = RUNS[name]
    # The last step of an epoch is not full, nor is its last micro-batch.
    run = trainer(trained_tokenizer, tmp_path, config, 19, **arguments)
    plan = run.plan
    run.train()
    expected = [plan.passes(keys) for epoch in (0, 1) for keys in plan.keys(epoch)]
    assert len(expected) == 2 * plan.steps_per_epoch == len(run.steps)
    assert [run.steps[number] for number in range(len(expected))] == expected
    assert any(one.views for step in expected for one in step) == run.jepa.uses_views
    costs = list(itertools.islice(plan.costs(), len(expected)))
    for cost, passes in zip(costs, expected, strict=True):
        assert cost == sum(plan.flops.of_pass(*one.shape, views=int(one.views)) for one in passes)


@pytest.mark.parametrize("mode", ["llm-jepa", "step-jepa"])
def test_regular_plan_is_that_of_a_regular_run(mode: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    config = {"mode": mode, "jepa_ratio": 0.5, "jepa_loss_type": "infonce"}
    regular = trainer(trained_tokenizer, tmp_path, {"mode": "regular"}, 19).plan
    own = trainer(trained_tokenizer, tmp_path, config, 19).plan
    for epoch in range(3):
        assert own.regular.epoch_costs(epoch) == regular.epoch_costs(epoch)
        # Under random order the steps of both hold the same records.
        assert own.regular_costs(epoch) == regular.epoch_costs(epoch)


def test_regular_costs_are_those_of_the_very_records() -> None:
    plan = made_up(101, strategy="group_by_length", batch_size=2, batches_per_step=4, pass_cost=None)
    for keys, cost in zip(plan.keys(1), plan.regular_costs(1), strict=True):
        plain = sorted(
            (plan.shapes.plain[key.record] for key in keys if key.record >= 0), key=lambda shape: shape.length
        )
        total = 0
        for start in range(0, len(keys), 2):
            micro = plain[start : start + 2]
            rows, length = max(len(micro), 1), max((shape.length for shape in micro), default=1)
            total += FLOPS.of_pass(rows, length, sum(shape.labels for shape in micro))
        assert cost == total


def made_up(count: int, *, jepa_ratio: float = 1.0, **options: Any) -> Plan:
    """A plan without forests, lengths as of short documents."""
    generator = np.random.default_rng(7)
    plain, whole = [], []
    for _ in range(count):
        length = int(generator.integers(31, 127))
        labels = length // 3
        plain.append(Shape(1, length, labels, 0))
        # Views are parts of the text.
        whole.append(Shape(1, length + 2 * length // 3 + int(generator.integers(2, 13)), labels, 1))
    shapes = Shapes(whole, plain, [shape.length for shape in whole])
    defaults: dict[str, Any] = {"batch_size": 8, "pass_cost": 64}
    return Plan(FLOPS, shapes, jepa_ratio=jepa_ratio, **defaults | options)


@pytest.mark.parametrize("seed", range(7))
def test_equal_steps_against_trying_every_number(seed: int) -> None:
    generator = np.random.default_rng(seed)
    costs = generator.integers(50, 150, 400).astype(float).tolist()
    budgets = np.cumsum(generator.integers(300, 4000, 5)).astype(float).tolist()
    found = equal_steps(iter(costs), budgets)
    sums = [0.0, *itertools.accumulate(costs)]
    best = [min(range(1, len(sums)), key=lambda steps: abs(sums[steps] - budget)) for budget in budgets]
    assert found.checkpoints == best
    assert found.steps == best[-1]
    assert found.flops == sums[best[-1]]
    assert found.regular_flops == budgets[-1]
    assert f"{found.steps} steps" in found.describe()


def test_equal_steps_at_the_edges() -> None:
    # Two epochs cheaper than one step, and a step dearer than the whole.
    assert equal_steps([10.0, 10.0], [1.0, 2.0, 17.0]).checkpoints == [1, 2]
    assert equal_steps([100.0], [1.0]) == EqualCompute(1, [1], 100.0, 1.0)
    with pytest.raises(ValueError, match="costs of steps worth 31 FLOPs, got 20"):
        equal_steps([10.0, 10.0], [31.0])


def test_regular_training_spends_its_own_compute() -> None:
    plan = made_up(203, batches_per_step=2).regular
    per_epoch = plan.steps_per_epoch
    assert per_epoch == math.ceil(203 / 16)
    assert equal_compute(plan, 3).checkpoints == [per_epoch, 2 * per_epoch, 3 * per_epoch]
    # As Trainer rounds up: a fraction of an epoch is a number of whole steps.
    assert equal_compute(plan, 1.5).checkpoints == [per_epoch, math.ceil(1.5 * per_epoch)]
    assert equal_compute(plan, 0.3).checkpoints == [math.ceil(0.3 * per_epoch)]


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.25])
def test_equal_compute_is_met_within_half_a_step(ratio: float) -> None:
    plan = made_up(1009, jepa_ratio=ratio)
    equal = equal_compute(plan, 3)
    assert len(equal.checkpoints) == 3
    assert equal.flops == pytest.approx(equal.regular_flops, rel=0.005)
    assert equal.steps < 3 * plan.steps_per_epoch


@pytest.mark.parametrize("options", [{}, {"batch_size": 2, "batches_per_step": 4, "pass_cost": None}])
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_loss_dropout_costs_what_is_expected_of_it(strategy: str, options: dict[str, Any]) -> None:
    def spent(plan: Plan) -> float:
        return sum(itertools.islice(plan.costs(), 2 * plan.steps_per_epoch))

    whole = made_up(2003, strategy=strategy, **options)
    expected = 0.25 * spent(whole) + 0.75 * spent(whole.regular)
    quarter = made_up(2003, jepa_ratio=0.25, strategy=strategy, **options)
    # LD 0.75, that is a quarter of the steps with views; steps are drawn, so it may also be a little less.
    assert 0.95 < spent(quarter) / expected <= 1.05


def test_a_large_run_is_planned_in_seconds() -> None:
    plan = made_up(8000, jepa_ratio=0.5, batch_size=16)
    start = time.perf_counter()
    assert equal_compute(plan, 4).steps > 0
    # About two on one slow core; a plan that ran passes would take hours.
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("config", [{"mode": "llm-jepa", "jepa_ratio": 0.5}, {"mode": "step-jepa", "pairs": "all"}])
def test_same_compute_as_the_regular_run_measured(
    config: dict[str, Any], trained_tokenizer: Any, tmp_path: Path
) -> None:
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    measured = []
    equal = equal_compute(trainer(trained_tokenizer, tmp_path, config, 80, **arguments).plan, 1)
    for chosen, steps in (({"mode": "regular"}, -1), (config, equal.steps)):
        run = trainer(trained_tokenizer, tmp_path, chosen, 80, max_steps=steps, num_train_epochs=1, **arguments)
        run.tracker = FlopTracker(run.flops, run.plan, steps=1000, say=None)
        run.train()
        run.tracker.close()
        measured.append(run.tracker.measured)
        predicted = list(itertools.islice(run.plan.costs(), len(measured[-1])))
        # The loss and the monitors are counted, but not derived.
        assert measured[-1] == pytest.approx(predicted, rel=0.01)
    assert len(measured[0]) == 40
    assert len(measured[1]) == equal.steps
    assert sum(measured[1]) == pytest.approx(sum(measured[0]), rel=0.02)
    assert equal.regular_flops == pytest.approx(sum(measured[0]), rel=0.01)
    assert equal.checkpoints[-1] == equal.steps


def test_micro_batches_of_a_step_add_up_to_it() -> None:
    shapes = [Shape(1, length, 3, 0) for length in (11, 13, 17, 19, 23, 29, 31)]
    plan = Plan(FLOPS, Shapes(shapes, shapes, [shape.length for shape in shapes]), 2, 4, 2)
    micro = plan.micro_costs(0)
    # Seven records are a step of four micro-batches, the last of them with an empty place.
    assert [len(costs) for costs in micro] == [4]
    assert [sum(costs) for costs in micro] == pytest.approx(plan.epoch_costs(0))
    (keys,) = plan.keys(0)
    batch = [shapes[key.record] for key in plan.micro_batches(keys)[0]]
    longest = max(shape.length for shape in batch)
    assert micro[0][0] == FLOPS.of_pass(2, longest, 6)
