"""As many steps as spend the compute of regular training: what every step of a run costs, before any is run.

The order of records, loss dropout and the packing into rows depend on nothing but records and settings, so the shapes
of all micro-batches are known in advance: they are collated as the run will collate them. What it is compared with is
regular training on the same records with the same ``row_length`` and ``share_prefixes``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from stepjepa.batch.collate import Batch, Collator
from stepjepa.batch.dataset import TokenizedDataset
from stepjepa.batch.sampler import Key, StepSampler
from stepjepa.compute.flops import FlopModel, counting

MEASURED_STEPS = 10
"""Steps that ``--track_flop`` measures, as the published scripts do."""


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
    """

    flops: FlopModel
    records: TokenizedDataset
    sampler: StepSampler
    collator: Collator
    batch_size: int
    batches_per_step: int = 1
    trains_rows: bool = False

    @cached_property
    def regular(self) -> Plan:
        """The plan of regular training on the same records with the same settings; its steps hold the same records."""
        # It sorts the records of a step also where a term compares pairs.
        sampler = replace(self.sampler, jepa_ratio=0.0, tight=True)
        return replace(self, flops=self.flops.regular(trains_rows=self.trains_rows), sampler=sampler)

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
        return _cut(list(self.sampler), self.records_per_step)

    def micro_batches(self, keys: Sequence[Key]) -> list[Batch]:
        """Those of a step, collated: of all processes, then the next ones that are accumulated."""
        return [self.collator(self.records[key] for key in part) for part in _cut(keys, self.batch_size)]

    def cost(self, keys: Sequence[Key]) -> float:
        """FLOPs of a step, over all processes."""
        # In double precision, as all sums here: whole runs of large models exceed 64-bit integers.
        return float(sum(map(self.flops.of_batch, self.micro_batches(keys))))

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


def _cut(keys: Sequence[Key], size: int) -> list[Any]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


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


def equal_compute(plan: Plan, epochs: float) -> EqualCompute:
    """As many steps of a run as spend the compute of ``epochs`` of regular training on the same records."""
    return equal_steps(plan.costs(), plan.regular.budgets(epochs))


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


class EqualComputeCallback(TrainerCallback):
    """Saves, and evaluates where evaluation is on, at the steps that stand in the place of regular epochs.

    A ``save_strategy`` or ``eval_strategy`` of ``epoch`` means these steps then, and no longer the run's own epochs;
    ``steps`` goes on beside them, and ``no`` is no.
    """

    def __init__(self, equal: EqualCompute) -> None:
        self._checkpoints = set(equal.checkpoints)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint and an evaluation where one is due."""
        if state.global_step in self._checkpoints:
            control.should_save |= args.save_strategy != SaveStrategy.NO
            control.should_evaluate |= args.eval_strategy != IntervalStrategy.NO

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take back what the run's own epochs ask for."""
        control.should_save &= args.save_strategy != SaveStrategy.EPOCH
        control.should_evaluate &= args.eval_strategy != IntervalStrategy.EPOCH


class FlopTracker:
    """Measures the FLOPs of the first optimizer steps and prints them beside the derived ones (``--track_flop``).

    Args:
        plan: gives what the model costs, and what regular training would pay for the same records.
        total: sums a list of numbers over all processes; every process calls it at the same steps.
        say: prints a line; None on processes that stay silent.
        steps: how many steps are measured.
    """

    def __init__(
        self,
        plan: Plan,
        total: Callable[[list[float]], list[float]],
        *,
        say: Callable[[str], None] | None = print,
        steps: int = MEASURED_STEPS,
    ) -> None:
        self._plan, self._total, self._say, self._steps = plan, total, say, steps
        self._number: int | None = None
        self._figures = [0.0, 0.0]
        self._done: list[list[float]] = []

    @contextmanager
    def step(self, number: int, batch: Batch) -> Iterator[None]:
        """Measure one micro-batch, forward and backward.

        Args:
            number: optimizer steps done before this one (``state.global_step``).
            batch: the micro-batch.
        """
        if self._number not in (None, number):
            self._finish_step()
        if len(self._done) >= self._steps:
            yield
            return
        self._number = number
        with counting() as counter:
            yield
        self._figures[0] += counter.get_total_flops()
        self._figures[1] += self._plan.flops.of_batch(batch)

    def close(self) -> None:
        """Print what is not printed yet: a run may be shorter than what is to be measured."""
        if self._number is not None:
            self._steps = len(self._done) + 1
            self._finish_step()

    @property
    def measured(self) -> list[float]:
        """FLOPs of each step, by torch's count."""
        return [figures[0] for figures in self._done]

    def _finish_step(self) -> None:
        assert self._number is not None
        regular = self._plan.regular
        epoch, place = divmod(self._number, regular.steps_per_epoch)
        self._done.append([*self._total(self._figures), regular.cost(regular.keys(epoch)[place])])
        self._tell(f"FLOPs of step {self._number + 1}", self._done[-1])
        self._number, self._figures = None, [0.0, 0.0]
        if len(self._done) == self._steps:
            self._tell(f"FLOPs per step, mean of {self._steps}", np.mean(self._done, axis=0).tolist())

    def _tell(self, what: str, figures: list[float]) -> None:
        measured, derived, regular = figures
        if self._say is not None:
            share = measured / regular
            self._say(f"{what}: {measured:.4e} measured, {derived:.4e} analytical, {share:.3f} of regular")
