"""No step on a loss or a gradient that is not finite: the run stops, or the step is left out."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.objectives.objective import jepa_loss
from stepjepa.run_folder import last_checkpoint
from stepjepa.training.nonfinite import (
    COUNT_FILE,
    GRADIENT,
    MOST_IN_A_ROW,
    MOST_OVERFLOWS,
    ON_NONFINITE,
    Finding,
    MicroBatch,
    OnNonfinite,
    broken_weight,
    describe,
    in_losses,
    keep,
)

if TYPE_CHECKING:
    from stepjepa.training.trainer import JepaTrainer

logger = logging.getLogger(__name__)


class NonfiniteGuard(TrainerCallback):
    """Looks at the gradient before every step of the optimizer, and decides on the step, on all processes alike.

    A loss that is not finite makes the gradient so, see :meth:`spoil`; what it was is found out only then.

    Args:
        trainer: whose steps are guarded.
        on_nonfinite: see ``nonfinite.OnNonfinite``.

    Attributes:
        on_nonfinite: as given.
        skipped: steps left out so far.
        step_taken: the last step was taken.
        micros: the micro-batches of the step that is being computed.

    Raises:
        ValueError: there is no such setting, or the optimizer can't be kept from its step.
    """

    def __init__(self, trainer: JepaTrainer, on_nonfinite: OnNonfinite) -> None:
        if on_nonfinite not in ON_NONFINITE:
            raise ValueError(f"on_nonfinite: expected one of {', '.join(ON_NONFINITE)}, got '{on_nonfinite}'")
        if on_nonfinite == "skip" and trainer.is_deepspeed_enabled:
            raise ValueError("on_nonfinite 'skip' can't keep DeepSpeed from a step; use 'stop', or train without it")
        self._trainer = trainer
        self.on_nonfinite = on_nonfinite
        self.micros: list[MicroBatch] = []
        self.skipped = self._in_a_row = self._overflows = 0
        self.step_taken = True
        # The Trainer's own look at every loss waits for the device in every micro-batch, and hides what it finds.
        trainer.args.logging_nan_inf_filter = False

    def begin_step(self) -> None:
        """Forget the micro-batches of the last step."""
        self.micros.clear()
        self.step_taken = True

    def spoil(self, loss: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """The same loss; where it is not finite, none of its gradients are.

        Gradients may be finite although the loss is not. Those of all processes are added up, so that each of them
        learns of it without a message, and no device is waited for.

        Args:
            loss: of a micro-batch.
            parts: what it is the sum of.
        """
        if self.micros:
            self.micros[-1].parts = {name: part.detach() for name, part in parts.items()}
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def save(self, folder: Path) -> None:
        """Write the counts into a checkpoint folder."""
        if self.skipped or self._in_a_row:
            write_json(folder / COUNT_FILE, {"skipped": self.skipped, "in_a_row": self._in_a_row})

    def load(self, folder: Path | None) -> None:
        """Begin a run, with the counts of the checkpoint that it goes on from."""
        counts = {"skipped": 0, "in_a_row": 0}
        if folder is not None and (folder / COUNT_FILE).is_file():
            counts = json.loads((folder / COUNT_FILE).read_text(encoding="utf-8"))
        self.skipped, self._in_a_row, self._overflows = int(counts["skipped"]), int(counts["in_a_row"]), 0

    # -- the decision -------------------------------------------------------------------------------------------------

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the norm of the gradient, one number that is the same on every process."""
        norm = self._norm()
        if math.isfinite(norm):
            self._in_a_row = self._overflows = 0
        else:
            self._decide(norm)

    def _norm(self) -> float:
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:
            # Its step was taken inside the backward pass.
            norm = trainer.model_wrapped.get_global_grad_norm()
            return 0.0 if norm is None else float(norm)
        return gradient_norm(trainer.model)

    def _decide(self, norm: float) -> None:
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        findings: list[Finding] = self._together(in_losses(trainer.args.process_index, self.micros))
        if scaler is not None and not findings:
            # Of fp16: the scale was too large, and the scaler leaves out the step and makes it smaller.
            self._overflows += 1
            if self._overflows < MOST_OVERFLOWS:
                return
        # Of all processes, which may each hold a part of the weights.
        weight = next(iter(self._together([name for name in [broken_weight(trainer.model)] if name])), None)
        if not findings and weight is None:
            findings = self._together(self._by_gradient())
        step, kept = trainer.state.global_step + 1, self._keep(findings, norm)
        what = describe(findings, trainer.source) if findings else "the gradient is not finite"
        if weight is not None:
            what += f"; the weights are not, either ({weight}), so it is no fault of these records"
        self._in_a_row += 1
        over = self._in_a_row > MOST_IN_A_ROW or self._overflows >= MOST_OVERFLOWS
        if self.on_nonfinite == "skip" and weight is None and not over:
            self._leave_out(by_scaler=scaler is not None)
            if trainer.is_world_process_zero():
                logger.warning("step %d is left out, the %d. so far: %s%s", step, self.skipped, what, kept)
            return
        if self._overflows >= MOST_OVERFLOWS:
            what += f", {self._overflows} times in a row at ever smaller scales of fp16; use --bf16 true"
        elif over:
            what += (
                f", after {MOST_IN_A_ROW} steps in a row that were left out; begin again with a lower --learning_rate"
            )
        elif weight is not None:
            what += "; begin again with a lower --learning_rate, or check the model that the run began with"
        else:
            what += "; pass --on_nonfinite skip, or begin again without these records or with a lower --learning_rate"
        trainer.model_wrapped.zero_grad()
        raise UserError(f"step {step}: {what}{kept}; {self.way_back()}")

    def _leave_out(self, *, by_scaler: bool) -> None:
        self.skipped += 1
        self.step_taken = False
        self._trainer.meter.leave_out()
        if not by_scaler:
            # Optimizers pass over what has no gradient: neither weights nor averages nor weight decay.
            self._trainer.model_wrapped.zero_grad(set_to_none=True)

    def _together(self, mine: list[Any]) -> list[Any]:
        """Those of all processes, in the order of their ranks."""
        found: list[Any] = gather_object(mine) if self._trainer.accelerator.num_processes > 1 else mine
        return found

    def _by_gradient(self) -> list[Finding]:
        """Which micro-batch it was, and which term: each is computed again, by itself."""
        trainer, found = self._trainer, []
        rank, model, accelerator = trainer.args.process_index, trainer.model_wrapped, trainer.accelerator
        parts = {} if trainer.is_fsdp_enabled else self.micros[-1].parts
        scaler = getattr(accelerator, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        with _random_kept(trainer.args.device):
            for number, micro in enumerate(self.micros):
                values = {}
                for name in parts:
                    model.zero_grad()
                    with accelerator.no_sync(model=model):
                        with trainer.compute_loss_context_manager():
                            batch = trainer._prepare_inputs(micro.batch)
                            part = jepa_loss(model, batch, trainer.objective, micro.counts, trainer.context()).parts[
                                name
                            ]
                        (part * scale).backward()
                    if not math.isfinite(gradient_norm(model)):
                        values[name] = float(part.detach())
                if values:
                    found.append(Finding(rank, number, micro.members.lines, values, by_gradient=True))
        # Where it is not to be seen again, each of them may have been it.
        suspects = [
            Finding(rank, number, micro.members.lines, {GRADIENT: math.nan}, by_gradient=True)
            for number, micro in enumerate(self.micros)
        ]
        return found if self._together(found) else suspects

    # -- what is left of it -------------------------------------------------------------------------------------------

    def _keep(self, findings: list[Finding], norm: float) -> str:
        """Keep the micro-batches of this process; says where, for people."""
        trainer = self._trainer
        folder, rate = Path(str(trainer.args.output_dir)), trainer.lr_scheduler.get_last_lr()[0]
        about = {"gradient_norm": str(norm), "learning_rate": rate, "on_nonfinite": self.on_nonfinite}
        paths: list[str] = []
        wrong: str | None = None
        try:
            for each in findings:
                if each.process == trainer.args.process_index:
                    micro, step = self.micros[each.number], trainer.state.global_step + 1
                    path = keep(folder, step, each, micro, source=trainer.source, about=about)
                    paths += [str(path)] if path else []
        except OSError as error:
            wrong = error.strerror or str(error)
        if wrong is not None:
            return f"; the batch could not be kept ({wrong})"
        return f"; kept in {', '.join(paths)}" if paths else ""

    def way_back(self) -> str:
        """From where the run can be gone on with, for people."""
        last = last_checkpoint(Path(str(self._trainer.args.output_dir)))
        if last is None:
            return "there is no checkpoint yet; begin again in another --output_dir"
        return f"{last.name} is as it was, and --resume_from_checkpoint last goes on with it"


def gradient_norm(model: nn.Module) -> float:
    """Norm of all gradients. Waits for the device."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


@contextmanager
def _random_kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside the block changes nothing that is drawn after it."""
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        yield
