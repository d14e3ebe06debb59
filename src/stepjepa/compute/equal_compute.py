"""The number of steps that spends the compute of regular training, from the FLOPs of every step, before any is run.

The order of records, loss dropout and the packing into rows depend on nothing but records and settings, so the shapes
of all micro-batches are known in advance: they are collated here as the run will collate them. The run is compared
with regular training on the same records with the same ``row_length`` and ``share_prefixes``.
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
from stepjepa.batch.dataset import Key, StepSampler, TokenizedDataset
from stepjepa.compute.flops import FlopModel, counting

MEASURED_STEPS = 10
"""Steps that ``--track_flop`` measures, as in the published scripts."""


@dataclass(frozen=True)
class Plan:
    """Everything that determines the cost of the steps of a run.

    Attributes:
        flops: FLOPs of the model as a function of a micro-batch's shape.
        records: training records.
        sampler: the sampler of the run.
        collator: the collator of the run.
        batch_size: records of a micro-batch of one process.
        batches_per_step: micro-batches of an optimizer step (gradient accumulation x processes).
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
        """The plan of regular training with the same settings; each of its steps has the same records."""
        # Regular training has no term that compares pairs, so it always sorts the records of a step by length.
        sampler = replace(self.sampler, jepa_ratio=0.0, tight=True)
        return replace(self, flops=self.flops.regular(trains_rows=self.trains_rows), sampler=sampler)

    @property
    def records_per_step(self) -> int:
        """Records of a full optimizer step."""
        return self.batch_size * self.batches_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last one may have fewer records."""
        return math.ceil(len(self.records) / self.records_per_step)

    def keys(self, epoch: int) -> list[list[Key]]:
        """The sampler's keys of an epoch, one list for each step."""
        self.sampler.set_epoch(epoch)
        return _cut(list(self.sampler), self.records_per_step)

    def micro_batches(self, keys: Sequence[Key]) -> list[Batch]:
        """The collated micro-batches of a step: one for each process, then the next ones of the accumulation."""
        return [self.collator(self.records[key] for key in part) for part in _cut(keys, self.batch_size)]

    def cost(self, keys: Sequence[Key]) -> float:
        """FLOPs of a step, over all processes."""
        # A float, as all sums here: the FLOPs of whole runs of large models exceed 64-bit integers.
        return float(sum(map(self.flops.of_batch, self.micro_batches(keys))))

    def costs(self) -> Iterator[float]:
        """Yield the FLOPs of each step over all processes, for an unlimited number of epochs."""
        epoch = 0
        while True:
            yield from map(self.cost, self.keys(epoch))
            epoch += 1

    def budgets(self, epochs: float) -> list[float]:
        """Cumulative FLOPs at the end of each epoch and at the end of the run."""
        steps = math.ceil(epochs * self.steps_per_epoch)
        ends = [*range(self.steps_per_epoch, steps, self.steps_per_epoch), steps]
        spent = np.cumsum([cost for _, cost in zip(range(steps), self.costs(), strict=False)])
        return [float(spent[end - 1]) for end in ends]


def _cut(keys: Sequence[Key], size: int) -> list[Any]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


@dataclass(frozen=True)
class EqualCompute:
    """Length of a run whose compute equals that of a regular run.

    Attributes:
        steps: optimizer steps to run.
        checkpoints: steps at which the compute of each regular epoch has been spent; the last is ``steps``.
        flops: FLOPs of these steps.
        regular_flops: FLOPs of the regular run.
    """

    steps: int
    checkpoints: list[int]
    flops: float
    regular_flops: float

    def describe(self) -> str:
        """One-line summary for the terminal."""
        points = ", ".join(map(str, self.checkpoints))
        return (
            f"{self.steps} steps, {self.flops:.4g} FLOPs, {self.flops / self.regular_flops:.4f} of the regular run; "
            f"a regular epoch's compute is spent at {points}"
        )


def equal_compute(plan: Plan, epochs: float) -> EqualCompute:
    """The number of steps that spends the compute of ``epochs`` of regular training on the same records."""
    return equal_steps(plan.costs(), plan.regular.budgets(epochs))


def equal_steps(costs: Iterable[float], budgets: Sequence[float]) -> EqualCompute:
    """The number of steps whose cumulative cost is nearest to a budget; of two equally near, the smaller.

    Args:
        costs: FLOPs of each step of the run, for at least as many steps as reach the last budget.
        budgets: cumulative FLOPs at the ends of the regular run's epochs, ascending; the last is the whole run.
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
    """Saves and evaluates at the steps where the compute of a regular epoch has been spent.

    With a ``save_strategy`` or ``eval_strategy`` of ``epoch`` these steps replace the ends of the run's own epochs;
    with ``steps`` they are added to its steps; with ``no`` they are ignored.
    """

    def __init__(self, equal: EqualCompute) -> None:
        self._checkpoints = set(equal.checkpoints)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a checkpoint and an evaluation at the steps of :class:`EqualCompute`."""
        if state.global_step in self._checkpoints:
            control.should_save |= args.save_strategy != SaveStrategy.NO
            control.should_evaluate |= args.eval_strategy != IntervalStrategy.NO

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Cancel the requests of the strategy ``epoch`` for the run's own epochs."""
        control.should_save &= args.save_strategy != SaveStrategy.EPOCH
        control.should_evaluate &= args.eval_strategy != IntervalStrategy.EPOCH


class FlopTracker:
    """Measures the FLOPs of the first optimizer steps and prints them beside the analytical ones (``--track_flop``).

    Args:
        plan: gives the analytical FLOPs, and those of regular training on the same records.
        total: sums each number of a list over all processes; every process must call it at the same steps.
        say: prints a line; None on processes that print nothing.
        steps: number of steps to measure.
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
            number: optimizer steps finished before this one (``state.global_step``).
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
        """Print the last step and the mean, if the run ended before all steps were measured."""
        if self._number is not None:
            self._steps = len(self._done) + 1
            self._finish_step()

    @property
    def measured(self) -> list[float]:
        """FLOPs of each measured step, by torch's counter."""
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
