"""The schedule of a run: the records and the FLOPs of every step, computed before training.

The order of records, loss dropout and the packing into rows depend on nothing but records and settings, so the shapes
of all micro-batches are known in advance: this module collates them as the run will. ``same_flop`` gives a
run the compute of regular training on the same records with the same ``row_length`` and ``share_prefixes``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from stepjepa.base.counting import counted
from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import SampleKey, StepSampler, TokenizedDataset
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.training.flop_counter import counting
from stepjepa.training.flops import FlopModel

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState


@dataclass(frozen=True)
class Plan:
    """Everything that determines the cost of the steps of a run."""

    flops: FlopModel
    records: TokenizedDataset
    sampler: StepSampler
    collator: Collator
    batch_size: int  # records of a micro-batch of one process
    trains_rows: bool = False  # see ``FlopModel.regular``

    @classmethod
    def of(
        cls,
        flops: FlopModel,
        dataset: TokenizedDataset,
        collator: Collator,
        config: JepaConfig,
        args: TrainingArguments,
        *,
        compares_pairs: bool,
        processes: int,
        group_by: str | None = None,
    ) -> Plan:
        """Make the plan of a run; the order of records is the same for any accumulation and number of processes.

        Args:
            flops: counts the FLOPs of a step.
            dataset: tokenised records.
            collator: makes micro-batches of them.
            config: of the objective.
            args: the Trainer's arguments.
            compares_pairs: whether a term compares the pairs of a micro-batch, so that records are not sorted by
                length.
            processes: number that train together.
            group_by: ``prompt`` to keep records of one prompt together; None for no groups.
        """
        batch_size, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
        sampler = StepSampler(
            dataset.lengths,
            batch_size * processes * accumulated,
            strategy=str(args.train_sampling_strategy),
            multiple=batch_size * processes,
            seed=args.seed if args.data_seed is None else args.data_seed,
            jepa_ratio=config.jepa_ratio if config.uses_views else 1.0,
            jepa_epochs=config.jepa_epochs,
            # Negatives must be drawn from all records, not from those of similar length.
            sort_by_length=not compares_pairs,
            groups=None if group_by is None else dataset.prompt_groups,
        )
        return cls(flops, dataset, sampler, collator, batch_size, config.plain)

    @cached_property
    def regular(self) -> Plan:
        """The plan of regular training with the same settings; each of its steps has the same records."""
        # Regular training has no term that compares pairs, so it always sorts the records of a step by length.
        sampler = replace(self.sampler, jepa_ratio=0.0, sort_by_length=True)
        return replace(self, flops=self.flops.regular(trains_rows=self.trains_rows), sampler=sampler)

    @property
    def records_per_step(self) -> int:
        """Records of an optimizer step: batch size x processes x accumulation."""
        return self.sampler.records_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last one may have fewer records."""
        return math.ceil(len(self.records) / self.records_per_step)

    def keys(self, epoch: int) -> list[list[SampleKey]]:
        """Return the sampler's keys of an epoch, one list for each step."""
        self.sampler.set_epoch(epoch)
        return _cut(list(self.sampler), self.records_per_step)

    def micro_batches(self, keys: Sequence[SampleKey]) -> list[Batch]:
        """Collate the micro-batches of a step: one for each process, then the next ones of the accumulation."""
        return [self.collator(self.records[key] for key in part) for part in _cut(keys, self.batch_size)]

    def saved_by_groups(self, most: int = 32) -> float:
        """Measure the share of tokens that the sampler's groups save, on at most ``most`` micro-batches of an epoch."""

        def computed_share(plan: Plan) -> float:
            """Return the number of computed tokens, relative to plain rows, in evenly spaced micro-batches."""
            parts = [part for step in plan.keys(0) for part in _cut(step, plan.batch_size)]
            batches = [batch for part in parts[:: -(-len(parts) // most)] for batch in plan.micro_batches(part)]
            return sum(batch.num_tokens for batch in batches) / sum(batch.records.plain_tokens for batch in batches)

        ungrouped = replace(self, sampler=replace(self.sampler, groups=None))
        return 1 - computed_share(self) / computed_share(ungrouped)

    def cost(self, keys: Sequence[SampleKey]) -> float:
        """Compute the FLOPs of the step with these keys, over all processes."""
        # A float, as all sums here: the FLOPs of whole runs of large models exceed 64-bit integers.
        return float(sum(map(self.flops.of_batch, self.micro_batches(keys))))

    def costs(self) -> Iterator[float]:
        """Yield the FLOPs of each step over all processes, for an unlimited number of epochs."""
        for epoch in count():
            yield from map(self.cost, self.keys(epoch))

    def budgets(self, epochs: float) -> list[float]:
        """Return the cumulative FLOPs at the end of each epoch and at the end of the run."""
        steps = math.ceil(epochs * self.steps_per_epoch)
        ends = [*range(self.steps_per_epoch, steps, self.steps_per_epoch), steps]
        spent = np.cumsum([cost for _, cost in zip(range(steps), self.costs(), strict=False)])
        return [float(spent[end - 1]) for end in ends]


def _cut(keys: Sequence[SampleKey], size: int) -> list[list[SampleKey]]:
    return [list(keys[start : start + size]) for start in range(0, len(keys), size)]


# -- runs at equal FLOPs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EqualCompute:
    """Length of a run whose compute equals that of a regular run."""

    steps: int
    checkpoints: list[int]  # steps at which the compute of each regular epoch has been spent; the last is ``steps``
    flops: float  # of these steps
    regular_flops: float

    def describe(self) -> str:
        """Describe the length and the compute of the run on one line."""
        points = ", ".join(map(str, self.checkpoints))
        return (
            f"{counted(self.steps, 'step')}, {self.flops:.4g} FLOPs, {self.flops / self.regular_flops:.4f} of the "
            f"regular run; a regular epoch's compute is spent at {points}"
        )


def equal_compute(plan: Plan, epochs: float) -> EqualCompute:
    """Return the number of steps that spends the compute of ``epochs`` of regular training on the same records."""
    return equal_steps(plan.costs(), plan.regular.budgets(epochs))


def equal_steps(costs: Iterable[float], budgets: Sequence[float]) -> EqualCompute:
    """Return the number of steps whose cumulative ``costs`` are nearest to a budget; the smaller of two equally near.

    ``budgets`` are the cumulative FLOPs at the ends of the regular run's epochs; the last is the whole run's.
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
    """Saves and evaluates where the compute of a regular epoch has been spent, not where the run's own epochs end."""

    def __init__(self, equal: EqualCompute) -> None:
        self._checkpoints = set(equal.checkpoints)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step in self._checkpoints:
            control.should_save |= args.save_strategy != SaveStrategy.NO
            control.should_evaluate |= args.eval_strategy != IntervalStrategy.NO

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        control.should_save &= args.save_strategy != SaveStrategy.EPOCH
        control.should_evaluate &= args.eval_strategy != IntervalStrategy.EPOCH


class FlopTracker:
    """Measures the FLOPs of the first optimizer steps and prints them beside the derived ones (``track_flop``).

    Args:
        flops: derives the FLOPs of a micro-batch.
        total: sums numbers over all processes.
        say: prints a line.
        steps: number of steps to measure, 10 as in the published scripts.
    """

    def __init__(
        self, flops: FlopModel, total: Callable[[list[float]], list[float]], say: Callable[[str], None], steps: int = 10
    ) -> None:
        self._flops, self._total, self._say, self._steps = flops, total, say, steps
        self._number: int | None = None
        self._sums = [0.0, 0.0]
        self.measured: list[float] = []

    @contextmanager
    def micro_batch(self, number: int, batch: Batch) -> Iterator[None]:
        """Measure one micro-batch, forward and backward; ``number`` optimizer steps came before its own."""
        if self._number not in (None, number):
            self.close()
        if len(self.measured) >= self._steps:
            yield
            return
        self._number = number
        with counting() as counter:
            yield
        self._sums[0] += counter.get_total_flops()
        self._sums[1] += self._flops.of_batch(batch)

    def close(self) -> None:
        """End a step, if one was begun."""
        if self._number is not None:
            measured, derived = self._total(self._sums)
            self._say(f"FLOPs of step {self._number + 1}: {measured:.4e} measured, {derived:.4e} analytical")
            self.measured.append(measured)
            self._number, self._sums = None, [0.0, 0.0]
