"""As many steps as spend the compute of regular training: what every step of a run costs, before any is run.

The order of records, loss dropout and the packing into rows depend on nothing but records and settings, so the shapes
of all micro-batches are known in advance: they are collated as the run will collate them. What it is compared with is
regular training on the same records with the same ``row_length`` and ``share_prefixes``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stepjepa.batch.collate import Batch, Collator
from stepjepa.batch.dataset import TokenizedDataset
from stepjepa.batch.sampler import Key, StepSampler
from stepjepa.compute.flops import FlopModel, Shape


@dataclass(frozen=True)
class Plan:
    """Everything that decides what the steps of a run cost.

    Attributes:
        flops: of the model.
        records: that are trained on.
        sampler: of the run.
        collator: of the run.
        batch_size: records of a micro-batch of one process.
        batches_per_step: micro-batches of an optimizer step, over accumulation and processes.
        trains_rows: see ``FlopModel.regular``.
        with_views: records have their views; not so in regular training.
    """

    flops: FlopModel
    records: TokenizedDataset
    sampler: StepSampler
    collator: Collator
    batch_size: int
    batches_per_step: int = 1
    trains_rows: bool = False
    with_views: bool = True

    @cached_property
    def regular(self) -> Plan:
        """The plan of regular training on the same records with the same settings; its steps hold the same records."""
        return replace(self, flops=self.flops.regular(trains_rows=self.trains_rows), with_views=False)

    @property
    def records_per_step(self) -> int:
        """Places of an optimizer step."""
        return self.batch_size * self.batches_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, the last of which may be short."""
        return math.ceil(len(self.records) / self.records_per_step)

    def keys(self, epoch: int) -> list[list[Key]]:
        """What each step of an epoch is made of."""
        self.sampler.set_epoch(epoch)
        keys = list(self.sampler)
        steps = [keys[start : start + self.records_per_step] for start in range(0, len(keys), self.records_per_step)]
        if self.with_views:
            return steps
        lengths = self.records.lengths

        def place(key: Key) -> tuple[bool, int, int]:
            return key.record < 0, int(lengths[key.record]), key.record

        # Regular training sorts the records of a step also where terms that compare pairs forbid it.
        return [sorted((key._replace(with_views=False) for key in step), key=place) for step in steps]

    def micro_batches(self, keys: Sequence[Key]) -> list[Sequence[Key]]:
        """The micro-batches of a step: those of all processes, then the next ones that are accumulated."""
        return [keys[start : start + self.batch_size] for start in range(0, len(keys), self.batch_size)]

    def collate(self, keys: Sequence[Key]) -> Batch:
        """The tensors of one of :meth:`micro_batches`."""
        return self.collator(self.records[key] for key in keys)

    def shapes(self, keys: Sequence[Key]) -> list[Shape]:
        """The shape of each micro-batch of a step."""
        return [Shape.of(self.collate(batch)) for batch in self.micro_batches(keys)]

    def cost(self, keys: Sequence[Key]) -> float:
        """FLOPs of a step, over all processes."""
        # In double precision, as all sums here: whole runs of large models exceed 64-bit integers.
        return float(sum(self.flops.of_shape(shape) for shape in self.shapes(keys)))

    def costs(self) -> Iterator[float]:
        """FLOPs of each step of a run, over all processes, epoch after epoch without end."""
        epoch = 0
        while True:
            yield from map(self.cost, self.keys(epoch))
            epoch += 1

    def budgets(self, epochs: float) -> list[float]:
        """FLOPs spent by this run at the end of each of its epochs, and at its end."""
        steps = math.ceil(epochs * self.steps_per_epoch)
        ends = [*range(self.steps_per_epoch, steps, self.steps_per_epoch), steps]
        spent = np.cumsum([cost for _, cost in zip(range(steps), self.costs(), strict=False)])
        return [float(spent[end - 1]) for end in ends]


@dataclass(frozen=True)
class EqualCompute:
    """A run that is as long as its compute allows.

    Attributes:
        steps: optimizer steps to run.
        checkpoints: steps at which the compute of each regular epoch has been spent; the last is ``steps``.
        flops: of these steps.
        regular_flops: of the regular run.
    """

    steps: int
    checkpoints: list[int]
    flops: float
    regular_flops: float

    def describe(self) -> str:
        """One line for people."""
        points = ", ".join(map(str, self.checkpoints))
        return (
            f"{self.steps} steps, {self.flops:.4g} FLOPs, {self.flops / self.regular_flops:.4f} of the regular run; "
            f"a regular epoch's compute is spent at {points}"
        )


def equal_steps(costs: Iterable[float], budgets: Sequence[float]) -> EqualCompute:
    """The number of steps whose cost comes nearest to a budget.

    Args:
        costs: FLOPs of each step of the run that is to be cut to size, for as long as the budget lasts.
        budgets: FLOPs spent at the ends of the regular run's epochs, ascending; the last is the whole.
    """
    remaining = iter(costs)
    spent = [0.0]
    checkpoints: list[int] = []
    for budget in budgets:
        while spent[-1] < budget:
            spent.append(spent[-1] + next(remaining))
        after = bisect_left(spent, budget)
        nearest = after - 1 if after and budget - spent[after - 1] <= spent[after] - budget else after
        checkpoints.append(max(nearest, 1))
    steps = checkpoints[-1]
    return EqualCompute(steps, sorted(set(checkpoints)), spent[steps], budgets[-1])


def equal_compute(plan: Plan, epochs: float) -> EqualCompute:
    """As many steps of a run as spend the compute of ``epochs`` of regular training on the same records."""
    return equal_steps(plan.costs(), plan.regular.budgets(epochs))
