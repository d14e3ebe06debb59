"""A trainer that knows what its steps cost: counted in every run, measured and budgeted on demand."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from stepjepa.compute.equal_compute import Plan
from stepjepa.compute.flop_callback import FlopTracker
from stepjepa.compute.flops import FlopModel

if TYPE_CHECKING:
    from stepjepa.config import JepaConfig
    from stepjepa.forests.preparation import Prepared


class FlopTrainer(Trainer):
    """The part of ``JepaTrainer`` that counts FLOPs; ``state.total_flos`` holds those of the run.

    Attributes:
        tracker: measures the first steps and prints what it finds; None for no measuring.
    """

    jepa: JepaConfig
    encoding: str
    prepared: Prepared | None
    tracker: FlopTracker | None = None

    @cached_property
    def flops(self) -> FlopModel:
        """What a pass of the model costs, derived from its modules before it is wrapped or sharded."""
        # Selective checkpointing is not told here: it runs no product again.
        whole = bool(self.args.gradient_checkpointing)
        kwargs = self.args.gradient_checkpointing_kwargs or {}
        reentrant = bool(kwargs.get("use_reentrant", False)) if isinstance(kwargs, dict) else False
        ema = self.jepa.target_grad == "ema"
        return FlopModel.of(self.model, gradient_checkpointing=whole, reentrant=reentrant, ema=ema)

    @property
    def plan(self) -> Plan:
        """What every step will cost.

        Raises:
            ValueError: there are no training records.
        """
        if self.prepared is None:
            raise ValueError("plan: expected training records, got none; pass train_dataset to JepaTrainer")
        return Plan.of(
            self.flops,
            self.prepared.dataset.forests,
            encoding=self.encoding,
            args=self.args,
            jepa=self.jepa,
            pass_cost=self.data_collator.pass_cost,
        )

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """FLOPs of a micro-batch, forward and backward, padding and attention included."""
        return self.flops.of_batch(inputs["groups"])

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """As in Trainer, measured where that was asked for."""
        measuring = nullcontext()
        if self.tracker is not None:
            measuring = self.tracker.step(self.state.global_step, inputs["groups"])  # type: ignore[assignment]
        with measuring:
            return super().training_step(model, inputs, num_items_in_batch)
