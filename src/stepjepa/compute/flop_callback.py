"""FLOPs in the training loop: measuring the first steps, saving where a regular epoch's compute has been spent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from stepjepa.batch.collate import Batch
from stepjepa.compute.equal_compute import EqualCompute, Plan
from stepjepa.compute.flops import counting

MEASURED_STEPS = 10
"""Steps that are measured, as the published scripts do."""


class FlopTracker:
    """Measures the FLOPs of the first optimizer steps and prints them beside the derived ones.

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
        self._plan, self._total, self._say, self._left = plan, total, say, steps
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
        if not self._left:
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
            self._left = 1
            self._finish_step()
        self._left = 0

    @property
    def measured(self) -> list[float]:  # described with the class
        return [figures[0] for figures in self._done]

    def _finish_step(self) -> None:
        assert self._number is not None
        number, self._number, self._left = self._number, None, self._left - 1
        regular = self._plan.regular
        epoch, place = divmod(number, regular.steps_per_epoch)
        self._done.append([*self._total(self._figures), regular.cost(regular.keys(epoch)[place])])
        self._figures = [0.0, 0.0]
        self._tell(f"FLOPs of step {number + 1}", self._done[-1])
        if not self._left:
            count = len(self._done)
            means = [sum(column) / count for column in zip(*self._done, strict=True)]
            self._tell(f"FLOPs per step, mean of {count}", means)

    def _tell(self, what: str, figures: list[float]) -> None:
        measured, derived, regular = figures
        if self._say is not None:
            share = measured / regular
            self._say(f"{what}: {measured:.4e} measured, {derived:.4e} analytical, {share:.3f} of regular")


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
