"""As many steps as spend the compute of regular training: what every step of a run costs, before any is run.

The order of records, loss dropout and the cut into passes depend on nothing but the settings, so the shapes of all
passes of all steps follow from the lengths of the records.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepjepa.compute.flops import FlopModel
from stepjepa.forests.forest import IGNORE, Forest, path
from stepjepa.forests.grouping import split_by_length
from stepjepa.forests.sampler import Key, StepSampler

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from stepjepa.config import JepaConfig


class Shape(NamedTuple):
    """What a record adds to a pass, or what a pass is.

    Attributes:
        rows: R.
        length: T, of the longest row.
        labels: positions at which logits are computed.
        pairs: of views.
    """

    rows: int
    length: int
    labels: int
    pairs: int


class Pass(NamedTuple):
    """One forward and backward pass.

    Attributes:
        shape: of its rows.
        views: its micro-batch has pairs.
    """

    shape: Shape
    views: bool


def shape_of(forest: Forest, encoding: str) -> Shape:
    """What one record adds to a pass.

    Args:
        forest: with its views or without.
        encoding: see ``collate.ForestCollator``.
    """
    labels, rows, length = forest.shift_labels, 1, len(forest)
    if encoding == "rows":
        paths = [path(forest, index) for index in range(len(forest.segments))]
        # Of rows that repeat the main text only the first has labels.
        labels, rows, length = labels[paths[0]], len(paths), max(map(len, paths))
    return Shape(rows, length, int((labels != IGNORE).sum()), len(forest.pairs))


def passes_of(shapes: Sequence[Shape], pass_cost: int | None) -> list[Pass]:
    """The passes that ``grouping.GroupCollator`` makes of a micro-batch.

    Args:
        shapes: of its records, empty places left out.
        pass_cost: as of the collator.
    """
    if not shapes:
        # As a process runs it that an uneven last step leaves empty.
        return [Pass(Shape(1, 1, 0, 0), False)]
    groups = split_by_length([shape.length for shape in shapes], pass_cost)
    views = any(shape.pairs for shape in shapes)
    passes = []
    for group in groups:
        rows, lengths, labels, pairs = zip(*(shapes[index] for index in group), strict=True)
        passes.append(Pass(Shape(sum(rows), max(lengths), sum(labels), sum(pairs)), views))
    return passes


@dataclass(frozen=True)
class Shapes:
    """Shapes of all records, in file order.

    Attributes:
        whole: see :func:`shape_of`, views included.
        plain: without views.
        lengths: tokens of each record with its views, by which the sampler sorts.
    """

    whole: list[Shape]
    plain: list[Shape]
    lengths: list[int]

    @classmethod
    def of(cls, forests: Sequence[Forest], encoding: str) -> Shapes:
        """Measure forests for an encoding, ``forest`` or ``rows``."""
        return cls(
            [shape_of(forest, encoding) for forest in forests],
            [shape_of(forest.without_views(), encoding) for forest in forests],
            [len(forest) for forest in forests],
        )

    def without_views(self) -> Shapes:
        """What the same records are in regular training."""
        return Shapes(self.plain, self.plain, [shape.length for shape in self.plain])


@dataclass(frozen=True)
class Plan:
    """Everything that decides what the steps of a run cost.

    Attributes:
        flops: of the model.
        shapes: of its records.
        batch_size: records of a micro-batch of one process.
        batches_per_step: micro-batches of an optimizer step, over accumulation and processes.
        processes: number of them.
        pass_cost: see ``grouping.GroupCollator``.
        seed: of the sampler.
        strategy: of the sampler.
        jepa_ratio: of the sampler; 1 in regular training.
        tight: of the sampler.
        trains_rows: see ``FlopModel.regular``.
    """

    flops: FlopModel
    shapes: Shapes
    batch_size: int
    batches_per_step: int = 1
    processes: int = 1
    pass_cost: int | None = None
    seed: int = 0
    strategy: str = "random"
    jepa_ratio: float = 1.0
    tight: bool = True
    trains_rows: bool = False

    @classmethod
    def of(
        cls,
        flops: FlopModel,
        forests: Sequence[Forest],
        *,
        encoding: str,
        args: TrainingArguments,
        jepa: JepaConfig,
        pass_cost: int | None,
    ) -> Plan:
        """The plan of a ``JepaTrainer`` with these settings.

        Args:
            flops: of its model.
            forests: its training records.
            encoding: ``forest`` or ``rows``.
            args: its ``TrainingArguments``.
            jepa: its objective.
            pass_cost: of its ``GroupCollator``.
        """
        return cls(
            flops,
            Shapes.of(forests, encoding),
            args.train_batch_size,
            args.gradient_accumulation_steps * args.world_size,
            args.world_size,
            pass_cost,
            args.seed if args.data_seed is None else args.data_seed,
            str(args.train_sampling_strategy),
            jepa.jepa_ratio if jepa.uses_views else 1.0,
            not jepa.compares_pairs,
            jepa.plain,
        )

    @cached_property
    def regular(self) -> Plan:
        """The plan of regular training on the same records with the same settings."""
        flops, shapes = self.flops.regular(trains_rows=self.trains_rows), self.shapes.without_views()
        return replace(self, flops=flops, shapes=shapes, jepa_ratio=1.0, tight=True)

    @property
    def records_per_step(self) -> int:
        """Places of an optimizer step."""
        return self.batch_size * self.batches_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, the last of which may be short."""
        return math.ceil(len(self.shapes.whole) / self.records_per_step)

    def keys(self, epoch: int) -> list[list[Key]]:
        """What the sampler gives to each step of an epoch."""
        sampler = StepSampler(
            self.shapes.lengths,
            self.records_per_step,
            text_lengths=[shape.length for shape in self.shapes.plain],
            seed=self.seed,
            strategy=self.strategy,
            jepa_ratio=self.jepa_ratio,
            tight=self.tight,
            multiple=self.batch_size * self.processes,
        )
        sampler.set_epoch(epoch)
        keys = list(sampler)
        return [keys[start : start + self.records_per_step] for start in range(0, len(keys), self.records_per_step)]

    def passes(self, keys: Sequence[Key]) -> list[Pass]:
        """Every pass of a step, over all its micro-batches and processes.

        Args:
            keys: one of :meth:`keys`.
        """
        result = []
        for batch in self.micro_batches(keys):
            present = [key for key in batch if key.record >= 0]
            found = [(self.shapes.whole if key.with_views else self.shapes.plain)[key.record] for key in present]
            result += passes_of(found, self.pass_cost)
        return result

    def epoch_costs(self, epoch: int) -> list[float]:
        """FLOPs of each step of an epoch, over all processes."""
        return self._costs(self.keys(epoch))

    def costs(self) -> Iterator[float]:
        """FLOPs of each step of a run, over all processes, epoch after epoch without end."""
        epoch = 0
        while True:
            yield from self.epoch_costs(epoch)
            epoch += 1

    def regular_costs(self, epoch: int) -> list[float]:
        """What regular training would pay for the very records of each step of an epoch."""
        lengths = self.regular.shapes.lengths
        steps = []
        for keys in self.keys(epoch):
            present = sorted(
                (key for key in keys if key.record >= 0), key=lambda key: (lengths[key.record], key.record)
            )
            steps.append(present + [key for key in keys if key.record < 0])
        return self.regular._costs(steps)

    def budgets(self, epochs: float) -> list[float]:
        """FLOPs spent by this run at the end of each of its epochs, and at its end."""
        steps = math.ceil(epochs * self.steps_per_epoch)
        ends = [*range(self.steps_per_epoch, steps, self.steps_per_epoch), steps]
        spent = np.cumsum([cost for cost, _ in zip(self.costs(), range(steps), strict=False)])
        return [float(spent[end - 1]) for end in ends]

    def micro_batches(self, keys: Sequence[Key]) -> list[Sequence[Key]]:
        """The micro-batches of a step: those of all processes, then the next ones that are accumulated."""
        return [keys[start : start + self.batch_size] for start in range(0, len(keys), self.batch_size)]

    def micro_costs(self, epoch: int) -> list[list[float]]:
        """FLOPs of each of :meth:`micro_batches` of each step of an epoch."""
        steps = [self.micro_batches(keys) for keys in self.keys(epoch)]
        costs = iter(self._costs([batch for batches in steps for batch in batches]))
        return [[next(costs) for _ in batches] for batches in steps]

    def _costs(self, steps: Sequence[Sequence[Key]]) -> list[float]:
        passes = [(number, one) for number, keys in enumerate(steps) for one in self.passes(keys)]
        # In double precision: whole runs of large models exceed 64-bit integers.
        rows, length, labels, pairs = np.asarray([one.shape for _, one in passes], np.float64).T
        views = np.asarray([one.views for _, one in passes], np.float64)
        flops = self.flops.of_pass(rows, length, labels, pairs, views=views)
        return np.bincount([number for number, _ in passes], weights=flops, minlength=len(steps)).tolist()


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

    Raises:
        ValueError: the costs end before the budget is spent.
    """
    remaining = iter(costs)
    spent = [0.0]
    checkpoints: list[int] = []
    for budget in budgets:
        while spent[-1] < budget:
            cost = next(remaining, None)
            if cost is None:
                raise ValueError(f"expected the costs of steps worth {budget:.4g} FLOPs, got {spent[-1]:.4g}")
            spent.append(spent[-1] + cost)
        after = bisect_left(spent, budget)
        nearest = after - 1 if after and budget - spent[after - 1] <= spent[after] - budget else after
        checkpoints.append(max(nearest, 1))
    steps = checkpoints[-1]
    return EqualCompute(steps, sorted(set(checkpoints)), spent[steps], budgets[-1])


def equal_compute(plan: Plan, epochs: float) -> EqualCompute:
    """As many steps of a run as spend the compute of ``epochs`` of regular training on the same records."""
    return equal_steps(plan.costs(), plan.regular.budgets(epochs))
