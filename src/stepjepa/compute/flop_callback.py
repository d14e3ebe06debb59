"""FLOPs in the training loop: measuring the first steps, saving where a regular epoch's compute has been spent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from stepjepa.batch.collate import Batch
from stepjepa.compute.equal_compute import EqualCompute, Plan
from stepjepa.compute.flops import FlopModel, counting

MEASURED_STEPS = 10
"""Steps that are measured, as the published scripts do."""


@dataclass
class _Step:
    number: int
    measured: float = 0.0
    derived: float = 0.0


class FlopTracker:
    """Measures the FLOPs of the first optimizer steps and prints them beside the derived ones.

    Args:
        flops: of the model.
        plan: gives what regular training would pay for the same records.
        steps: how many steps are measured.
        say: prints a line; None on processes that stay silent.
        total: sums a list of numbers over all processes; every process calls it at the same steps. None for one.

    Example:
        >>> with tracker.step(self.state.global_step, inputs):
        ...     loss = super().training_step(model, inputs, num_items_in_batch)
    """

    def __init__(
        self,
        flops: FlopModel,
        plan: Plan,
        *,
        steps: int = MEASURED_STEPS,
        say: Callable[[str], None] | None = print,
        total: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        self._flops = flops
        self._plan = plan
        self._left = steps
        self._say = say
        self._total = total
        self._current: _Step | None = None
        self._done: list[tuple[_Step, float]] = []

    @contextmanager
    def step(self, number: int, batch: Batch) -> Iterator[None]:
        """Measure one micro-batch, forward and backward.

        Args:
            number: optimizer steps done before this one (``state.global_step``).
            batch: the micro-batch.
        """
        if self._current is not None and self._current.number != number:
            self._finish_step()
        if not self._left:
            yield
            return
        if self._current is None:
            self._current = _Step(number)
        with counting() as counter:
            yield
        self._current.measured += counter.get_total_flops()
        self._current.derived += self._flops.of_batch(batch)

    def close(self) -> None:
        """Print what is not printed yet: a run may be shorter than what is to be measured."""
        if self._current is not None:
            self._left = 1
            self._finish_step()
        self._left = 0

    @property
    def measured(self) -> list[float]:
        """FLOPs of the measured steps, over all processes."""
        return [step.measured for step, _ in self._done]

    def _finish_step(self) -> None:
        step = self._current
        assert step is not None
        self._current = None
        self._left -= 1
        if self._total is not None:
            step.measured, step.derived = self._total([step.measured, step.derived])
        regular = self._regular_cost(step.number)
        self._done.append((step, regular))
        if self._say is None:
            return
        self._say(f"FLOPs of step {step.number + 1}: {self._figures(step.measured, step.derived, regular)}")
        if not self._left:
            count = len(self._done)
            sums = [sum(s.measured for s, _ in self._done), sum(s.derived for s, _ in self._done)]
            sums.append(sum(regular for _, regular in self._done))
            self._say(f"FLOPs per step, mean of {count}: {self._figures(*(value / count for value in sums))}")

    def _figures(self, measured: float, derived: float, regular: float) -> str:
        return f"{measured:.4e} measured, {derived:.4e} analytical, {measured / regular:.3f} of regular"

    def _regular_cost(self, number: int) -> float:
        plan = self._plan.regular
        epoch, place = divmod(number, plan.steps_per_epoch)
        return plan.cost(plan.keys(epoch)[place])


class EqualComputeCallback(TrainerCallback):
    """Saves, and evaluates where evaluation is on, at the steps that stand in the place of regular epochs.

    A ``save_strategy`` or ``eval_strategy`` of ``epoch`` means these steps then, and no longer the run's own epochs;
    ``steps`` goes on beside them, and ``no`` is no.

    Args:
        equal: gives the steps.
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
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = False
        if args.eval_strategy == IntervalStrategy.EPOCH:
            control.should_evaluate = False
