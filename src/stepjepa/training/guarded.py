"""A trainer that takes no step it should not: losses and gradients that are not finite, memory that runs out."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import Trainer

from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.objectives.monitors import Window
from stepjepa.run_folder import last_checkpoint
from stepjepa.training import out_of_memory
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
    has_broken_gradient,
    in_losses,
    keep,
)
from stepjepa.training.out_of_memory import naming_the_batch, remedies

logger = logging.getLogger(__name__)


class GuardedTrainer(Trainer):
    """The part of ``JepaTrainer`` that looks at what a step has computed before the step is taken.

    What it looks at is the norm of the gradient, which the Trainer computes anyway: one number, the same on every
    process, and the one time that a step waits for its device. A loss that is not finite makes the gradient so, see
    :meth:`spoil`. What it was is found out only then.

    Attributes:
        on_nonfinite: see ``nonfinite.OnNonfinite``.
        skipped: steps left out so far.
        step_taken: the last step was taken.
        selective: activations are checkpointed selectively; for what is said where memory runs out.
    """

    on_nonfinite: OnNonfinite = "stop"
    skipped: int = 0
    step_taken: bool = True
    selective: bool = False
    _window: Window
    _left_out: bool
    _in_a_row: int = 0
    _overflows: int = 0
    _micros: list[MicroBatch]

    def _guard(self, on_nonfinite: OnNonfinite) -> None:
        """Take the setting; called once, when the Trainer is made.

        Raises:
            ValueError: there is no such setting, or the optimizer can't be kept from its step.
        """
        if on_nonfinite not in ON_NONFINITE:
            raise ValueError(f"on_nonfinite: expected one of {', '.join(ON_NONFINITE)}, got '{on_nonfinite}'")
        if on_nonfinite == "skip" and self.is_deepspeed_enabled:
            raise ValueError("on_nonfinite 'skip' can't keep DeepSpeed from a step; use 'stop', or train without it")
        self.on_nonfinite = on_nonfinite
        self._micros = []
        # The Trainer's own look at every loss waits for the device in every micro-batch, and hides what it finds.
        self.args.logging_nan_inf_filter = False

    @property
    def source(self) -> str:
        """What errors call the file of the training records."""
        raise NotImplementedError

    def parts_of(self, model: nn.Module, inputs: dict[str, Any], counts: Tensor | None) -> dict[str, Tensor]:
        """The losses of a micro-batch on its device, by name, and ``loss``, their weighted sum."""
        raise NotImplementedError

    # -- the step -----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer: the micro-batches of a step, which begins."""
        self._micros.clear()
        self.step_taken = True
        self._window.mark()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """As in Trainer; a loss that is not finite is kept out of the sum that the Trainer logs."""
        self._micros.append(MicroBatch(inputs, num_items_in_batch))
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)

    def spoil(self, loss: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """The same loss; where it is not finite, none of its gradients are.

        Gradients may be finite although the loss is not. Those of all processes are added up, so that each of them
        learns of it without a message, and no device is waited for.

        Args:
            loss: of a micro-batch.
            parts: what it is the sum of.
        """
        if self._micros:
            self._micros[-1].parts = {name: part.detach() for name, part in parts.items() if name != "loss"}
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As in Trainer, which calls it before every step of the optimizer, and with it decides on the step."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None or math.isfinite(float(norm)):
            self._in_a_row = self._overflows = 0
            return norm
        self._decide(model, float(norm))
        # What was not taken has no norm to be logged.
        return None

    def _decide(self, model: nn.Module, norm: float) -> None:
        """On a gradient that is not finite, on all processes alike."""
        scaler = getattr(self.accelerator, "scaler", None)
        findings: list[Finding] = self._together(in_losses(self.args.process_index, self._micros))
        if scaler is not None and not findings:
            # Of fp16: the scale was too large, and the scaler leaves out the step and makes it smaller.
            self._overflows += 1
            if self._overflows < MOST_OVERFLOWS:
                return
        # Of all processes, which may each hold a part of the weights.
        weight = next(iter(self._together([name for name in [broken_weight(model)] if name])), None)
        if not findings and weight is None:
            findings = self._together(self._by_gradient(model))
        step, kept = self.state.global_step + 1, self._keep(findings, norm)
        what = describe(findings, self.source) if findings else "the gradient is not finite"
        if weight is not None:
            what += f"; the weights are not, either ({weight}), so it is no fault of these records"
        self._in_a_row += 1
        over = self._in_a_row > MOST_IN_A_ROW or self._overflows >= MOST_OVERFLOWS
        if self.on_nonfinite == "skip" and weight is None and not over:
            self._leave_out(model, scaler is not None)
            if self.is_world_process_zero():
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
        model.zero_grad()
        raise UserError(f"step {step}: {what}{kept}; {self._last_checkpoint()}")

    def _leave_out(self, model: nn.Module, by_scaler: bool) -> None:
        self.skipped += 1
        self.step_taken = False
        self._left_out = True
        self._window.back()
        if not by_scaler:
            # Optimizers pass over what has no gradient: neither weights nor averages nor weight decay.
            model.zero_grad(set_to_none=True)

    def _together(self, mine: list[Any]) -> list[Any]:
        """Those of all processes, in the order of their ranks."""
        found: list[Any] = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        return found

    def _by_gradient(self, model: nn.Module) -> list[Finding]:
        """Which micro-batch it was, and which part of its loss: each is computed again, by itself."""
        rank, found = self.args.process_index, []
        parts = {} if self.is_fsdp_enabled or self.is_deepspeed_enabled else self._micros[-1].parts
        scaler = getattr(self.accelerator, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        with _random_kept(self.args.device):
            for number, micro in enumerate(self._micros):
                values = {}
                for name in parts:
                    model.zero_grad()
                    with self.accelerator.no_sync(model=model), self.compute_loss_context_manager():
                        part = self.parts_of(model, self._prepare_inputs(micro.inputs), micro.counts)[name]
                    with self.accelerator.no_sync(model=model):
                        (part * scale).backward()
                    if has_broken_gradient(model):
                        values[name] = float(part.detach())
                if values:
                    found.append(Finding(rank, number, micro.members.lines, values, by_gradient=True))
        # Where it is not to be seen again, each of them may have been it.
        suspects = [
            Finding(rank, number, micro.members.lines, {GRADIENT: math.nan}, by_gradient=True)
            for number, micro in enumerate(self._micros)
        ]
        return found if self._together(found) else suspects

    # -- what is left of it -------------------------------------------------------------------------------------------

    def _keep(self, findings: list[Finding], norm: float) -> str:
        """Keep the micro-batches of this process; says where, for people."""
        folder, rate = Path(str(self.args.output_dir)), self._get_learning_rate()
        about = {"gradient_norm": str(norm), "learning_rate": rate, "on_nonfinite": self.on_nonfinite}
        paths: list[str] = []
        wrong: str | None = None
        try:
            for each in findings:
                if each.process == self.args.process_index:
                    micro, step = self._micros[each.number], self.state.global_step + 1
                    path = keep(folder, step, each, micro, source=self.source, about=about)
                    paths += [str(path)] if path else []
        except OSError as error:
            wrong = error.strerror or str(error)
        if wrong is not None:
            return f"; the batch could not be kept ({wrong})"
        return f"; kept in {', '.join(paths)}" if paths else ""

    def _last_checkpoint(self) -> str:
        last = last_checkpoint(Path(str(self.args.output_dir)))
        if last is None:
            return "there is no checkpoint yet; begin again in another --output_dir"
        return f"{last.name} is as it was, and --resume_from_checkpoint last goes on with it"

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and (self.skipped or self._in_a_row):
            write_json(Path(output_dir) / COUNT_FILE, {"skipped": self.skipped, "in_a_row": self._in_a_row})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = None if checkpoint is None else Path(checkpoint) / COUNT_FILE
        if path is not None and path.is_file():
            counts = json.loads(path.read_text(encoding="utf-8"))
            self.skipped, self._in_a_row = int(counts["skipped"]), int(counts["in_a_row"])

    # -- memory -------------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer.

        Raises:
            UserError: memory has run out, or a loss or a gradient is not finite; no checkpoint has been touched.
        """
        self.skipped = self._in_a_row = self._overflows = 0
        with naming_the_batch(self._describe_memory):
            result = super().train(*args, **kwargs)
        self._micros.clear()
        return result

    def _describe_memory(self) -> str:
        micro = self._micros[-1] if self._micros else None
        said = out_of_memory.describe(f"step {self.state.global_step + 1}", micro, self.source)
        return f"{said}; {remedies(self.args, selective=self.selective)}; {self._last_checkpoint()}"

    def describe_memory_of_evaluation(self, inputs: dict[str, Any], source: str) -> str:
        """What is said where memory runs out on a batch of held-out records."""
        said = out_of_memory.describe("the evaluation", MicroBatch(inputs), source)
        return f"{said}; pass --per_device_eval_batch_size 1 or --bf16 true, or begin again with a smaller --max_length"


@contextmanager
def _random_kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside the block changes nothing that is drawn after it."""
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        yield
