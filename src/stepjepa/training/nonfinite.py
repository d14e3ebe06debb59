"""No optimizer step on a loss or a gradient that is not finite: the run stops, or the step is skipped."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from stepjepa.batch.collate import Batch
from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.objectives.objective import Losses
from stepjepa.objectives.term import TERMS
from stepjepa.training.failures import way_back

if TYPE_CHECKING:
    from stepjepa.training.trainer import JepaTrainer

logger = logging.getLogger(__name__)

OnNonfinite = Literal["stop", "skip"]
"""What becomes of a step whose loss or gradient is not finite: the run stops, or the step is not taken."""

MOST_IN_A_ROW = 10
"""Steps in a row that may be skipped; after them something else is wrong than a batch."""

COUNT_FILE = "nonfinite.json"
"""In a checkpoint: how many steps had been skipped."""

# Records that a message names.
_NAMED = 8


class NonfiniteGuard(TrainerCallback):
    """Looks at the norm of the gradient before every optimizer step, and decides on the step, on all processes alike.

    Args:
        trainer: whose steps are guarded.
        on_nonfinite: see ``OnNonfinite``.

    Attributes:
        on_nonfinite: as given.
        skipped: steps skipped so far.
        step_taken: the last step was taken.
        batches: the micro-batches of the step that is being computed.
        parts: the means of their terms, on their device; not yet there of one that is being computed.

    Raises:
        ValueError: there is no such setting, or the optimizer can't be kept from its step.
    """

    def __init__(self, trainer: JepaTrainer, on_nonfinite: OnNonfinite) -> None:
        if on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"on_nonfinite: expected stop or skip, got '{on_nonfinite}'")
        if on_nonfinite == "skip" and trainer.is_deepspeed_enabled:
            raise ValueError("on_nonfinite 'skip' can't keep DeepSpeed from a step; use 'stop', or train without it")
        self._trainer = trainer
        self.on_nonfinite = on_nonfinite
        self.batches: list[Batch] = []
        self.parts: list[dict[str, Tensor]] = []
        self.skipped = self._in_a_row = 0
        self.step_taken = True
        # The Trainer's own look at every loss waits for the device in every micro-batch, and hides what it finds.
        trainer.args.logging_nan_inf_filter = False

    def begin_step(self) -> None:
        """Forget the micro-batches of the last step."""
        self.batches.clear()
        self.parts.clear()
        self.step_taken = True

    def watch(self, losses: Losses) -> Tensor:
        """The loss of a micro-batch; where it is not finite, none of its gradients are.

        Gradients may be finite although the loss is not. Those of all processes are added up, so that each of them
        learns of it without a message, and no device is waited for.
        """
        self.parts.append({name: part.detach() for name, part in losses.parts.items()})
        return losses.loss * torch.where(torch.isfinite(losses.loss.detach()), 1.0, math.nan)

    def save(self, folder: Path) -> None:
        """Write the count into a checkpoint folder."""
        if self.skipped:
            write_json(folder / COUNT_FILE, {"skipped": self.skipped})

    def load(self, folder: Path) -> None:
        """Read it back."""
        if (folder / COUNT_FILE).is_file():
            self.skipped = int(json.loads((folder / COUNT_FILE).read_text(encoding="utf-8"))["skipped"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the run or skip the step where the norm of the gradient, the same on every process, is not finite."""
        trainer = self._trainer
        if math.isfinite(_gradient_norm(trainer)):
            self._in_a_row = 0
            return
        mine = [
            (batch["members"].lines, _not_finite(parts)) for batch, parts in zip(self.batches, self.parts, strict=True)
        ]
        found = gather_object(mine) if trainer.accelerator.num_processes > 1 else mine
        wrong = {name: value for _, values in found for name, value in values.items()}
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and not wrong:
            # Of fp16: the scale was too large, and the scaler skips the step and makes it smaller.
            return
        what = " and ".join(f"{_label(name)} is {value}" for name, value in wrong.items())
        lines = [line for members, values in found if values or not wrong for line in members]
        message = f"{what or 'the gradient is not finite (the losses are)'}, with {name_records(trainer.source, lines)}"
        self._in_a_row += 1
        broken = self._broken_weights()
        if self.on_nonfinite == "stop" or self._in_a_row > MOST_IN_A_ROW or broken:
            trainer.model_wrapped.zero_grad()
            remedy = "pass --on_nonfinite skip, or begin again without these records or with a lower --learning_rate"
            if broken:
                remedy = f"the weights are not finite, either ({broken[0]}); begin again with a lower --learning_rate"
            elif self.on_nonfinite == "skip":
                remedy = f"{MOST_IN_A_ROW} steps in a row were skipped before; begin again with a lower --learning_rate"
            raise UserError(f"step {state.global_step + 1}: {message}; {remedy}; {way_back(args.output_dir)}")
        self.skipped += 1
        self.step_taken = False
        trainer.meter.skip_step()
        if scaler is None:
            # Optimizers pass over what has no gradient: neither weights nor averages nor weight decay.
            trainer.model_wrapped.zero_grad(set_to_none=True)
        if trainer.is_world_process_zero():
            logger.warning("step %d is skipped, the %d. so far: %s", state.global_step + 1, self.skipped, message)

    def refuse_weights(self, step: int) -> None:
        """Refuse weights that are not finite: neither a checkpoint nor a finished run may hold them.

        Raises:
            UserError: on every process, if one has such a weight.
        """
        if broken := self._broken_weights():
            raise UserError(
                f"step {step}: the weights are not finite any more ({broken[0]}), so they are not saved; begin again "
                f"with a lower --learning_rate, or in another precision; {way_back(str(self._trainer.args.output_dir))}"
            )

    def _broken_weights(self) -> list[str]:
        """Parameters that are not finite, the first one of each process that has one."""
        broken: list[str] = []
        for name, parameter in self._trainer.model.named_parameters():
            # Of a weight that is sharded, the part that is here.
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not bool(torch.isfinite(here).all()):
                broken.append(name)
                break
        return gather_object(broken) if self._trainer.accelerator.num_processes > 1 else broken


def _gradient_norm(trainer: JepaTrainer) -> float:
    """Norm of all gradients. Waits for the device."""
    if trainer.is_deepspeed_enabled:
        # Its step was taken inside the backward pass.
        return float(trainer.model_wrapped.get_global_grad_norm() or 0.0)
    gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _not_finite(parts: dict[str, Tensor]) -> dict[str, float]:
    """The parts of a loss that are not finite. Waits for the device."""
    return {name: value for name, part in parts.items() if not math.isfinite(value := float(part))}


def _label(name: str) -> str:
    return TERMS[name].words if name in TERMS else name


def name_records(source: str, lines: Iterable[int]) -> str:
    """Records as ``file:line``, the first of them."""
    lines = list(dict.fromkeys(lines))
    named = [f"{source}:{line}" for line in lines[:_NAMED]]
    return ", ".join(named) + (f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else "")
