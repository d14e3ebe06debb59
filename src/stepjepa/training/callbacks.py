"""Callbacks of the trainer: averages, log lines, warning of a collapse, no non-finite gradients."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ProgressCallback, TrainerCallback

from stepjepa.base.errors import UserError
from stepjepa.base.files import append_jsonl, read_jsonl, write_jsonl
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note, spelled
from stepjepa.batch.micro_batch import Batch
from stepjepa.models.ema import EmaEncoder
from stepjepa.models.weights import all_finite
from stepjepa.objectives.monitors import collapse_remedies, describe_collapse
from stepjepa.objectives.term import TERMS
from stepjepa.store.folder import BOARD_FOLDER, METRICS_FILE
from stepjepa.training.interface import TrainerInterface
from stepjepa.training.recording import Recorder
from stepjepa.training.saving import resume_hint

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from stepjepa.objectives.objective import Losses

logger = logging.getLogger(__name__)


class EmaCallback(TrainerCallback):
    """Updates averaged weights after every step."""

    def __init__(self, ema: EmaEncoder, model: nn.Module) -> None:
        self._ema, self._model = ema, model

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Add the weights of the model that is trained to their average."""
        self._ema.update(self._model)


def place_tensorboard(callbacks: Iterable[TrainerCallback], folder: Path) -> None:
    """Have TensorBoard's files written into a run folder, unless ``TENSORBOARD_LOGGING_DIR`` names another place.

    Trainer would make a folder named after the time, which a resumed run would not continue in.

    Args:
        callbacks: all callbacks of a trainer.
        folder: the run folder.
    """
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = callback.logging_dir or str(folder / BOARD_FOLDER)


# -- log lines ---------------------------------------------------------------------------------------------------------


def console_line(logs: dict[str, float]) -> str | None:
    """Format a line of logs for the terminal; None for logs without losses.

    The line of an evaluation begins with ``eval`` and the name of its set of held-out records, if it has one.
    """
    evaluated = (name for name in logs if name.startswith("eval_") and name.endswith("lm_loss"))
    # Empty, ``eval_``, or ``eval_NAME_``.
    prefix = next(evaluated, "").removesuffix("lm_loss")
    if f"{prefix}lm_loss" not in logs:
        return None
    # Scores of answers and of retrieval have no name of a set.
    values = {name.removeprefix(prefix).removeprefix("eval_"): value for name, value in logs.items()}
    answers = [name.removeprefix("answer_") for name in values if name.startswith("answer_")]
    patterns = {name: f"{TERMS[name].label}: {{:.4f}}" for name in values if name in TERMS} | {
        "loss": "Total: {:.4f}",
        "matched_similarity": "cosine of pairs: {:.3f}",
        "shuffled_similarity": "shuffled: {:.3f}",
        "source_rank": "rank of sources: {:.1f}",
        "target_rank": "rank of targets: {:.1f}",
        **{f"answer_{score}": f"{score}: {{:.3f}}" for score in answers},
        "retrieval_hits_at_1": "hits at 1: {:.3f}",
        "tokens_per_second": "{:,.0f} tok/s",
    }
    parts = [pattern.format(values[name]) for name, pattern in patterns.items() if name in values]
    return (f"{prefix.rstrip('_').replace('_', ' ', 1)}  " if prefix else "") + ", ".join(parts)


class LogCallback(TrainerCallback):
    """Writes every line of logs to ``metrics.jsonl``, prints its losses, and warns of a collapse, once in a run."""

    def __init__(self, recorder: Recorder, compares_pairs: bool = False) -> None:
        self._recorder, self._compares_pairs = recorder, compares_pairs
        self._warned = False
        self._untrained: list[JsonObject] = []  # lines of evaluations before the training

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Drop log lines after the checkpoint that a run is resumed from: those steps are run again.

        Lines that this process has written before the training stay.
        """
        self._warned = any(describe_collapse(line) for line in state.log_history)
        path = Path(args.output_dir) / METRICS_FILE
        before = self._recorder.steps_before
        if state.is_world_process_zero and path.exists():
            # The history of a further call of ``train`` has its own lines alone. Half a line is left by a kill.
            lines = read_jsonl(path, on_error=lambda error: None) if before else ()
            earlier = [line for _, line in lines if line.get("step", 0) <= before]
            first: JsonObject = {"step": 0, "epoch": None}
            history = [first | line | {"step": before + line["step"]} for line in state.log_history]
            write_jsonl(path, [*self._untrained, *earlier, *history])
        self._untrained.clear()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Append a line of logs to the file of metrics, print it, and warn once of a collapse."""
        if not state.is_world_process_zero or not logs:
            return
        path = Path(args.output_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        line: JsonObject = {"step": self._recorder.steps_before + state.global_step, "epoch": state.epoch, **logs}
        if not state.max_steps:
            self._untrained.append(line)
        if self._is_of_another(path):
            note(
                f"{path} is another run's or your own, so the evaluation is not added to it; name another `output_dir`"
            )
        else:
            self._recorder.began_metrics |= not path.exists()
            append_jsonl(path, [line])
        if (losses := console_line(logs)) is not None:
            # Above the progress bar, where there is one.
            tqdm.write(f"step {state.global_step}/{state.max_steps}  {losses}", file=sys.stdout)
            sys.stdout.flush()
        if not self._warned and (warning := describe_collapse(logs)) is not None:
            self._warned = True
            remedies = spelled(collapse_remedies(self._compares_pairs))
            logger.warning("step %d: %s; %s", state.global_step, warning, remedies)

    def _is_of_another(self, metrics: Path) -> bool:
        """Return whether a file of metrics was written by the user, or by a run other than this trainer's."""
        return metrics.exists() and not self._recorder.began_metrics and self._recorder.record is None


class BarCallback(ProgressCallback):
    """The Trainer's progress bar without its own lines of logs, which ``LogCallback`` prints."""

    on_log = TrainerCallback.on_log


# -- losses, gradients and weights that are not finite -----------------------------------------------------------------


NAMED_RECORDS = 8
"""Most records that the error of a step names."""


class _Means(NamedTuple):
    """The means of the terms over a micro-batch, with the lines of its records."""

    lines: tuple[int, ...]
    values: dict[str, float]

    @property
    def not_finite(self) -> dict[str, float]:
        """The values that are not finite."""
        return {name: value for name, value in self.values.items() if not math.isfinite(value)}


class NonfiniteGuard(TrainerCallback):
    """Stops a ``JepaTrainer`` before an optimizer step on a gradient that is not finite, on all processes alike."""

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self.batches: list[Batch] = []  # of the step that is being computed
        self._parts: list[dict[str, Tensor]] = []
        self.norm: Tensor | float | None = None  # of the step's gradient, before Trainer clips it

    def begin_step(self) -> None:
        """Forget the micro-batches of the previous step."""
        self.batches.clear()
        self._parts.clear()

    def watch(self, losses: Losses) -> Tensor:
        """Return the loss of a micro-batch, times NaN if it is not finite, so that all of its gradients are NaN.

        The sum of the gradients over all processes is then NaN, too: every process notices without a message, and
        without waiting for its device.
        """
        self._parts.append({name: part.detach() for name, part in losses.parts.items()})
        return losses.loss * torch.where(torch.isfinite(losses.loss.detach()), 1.0, math.nan)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Raise ``UserError`` if the norm of the gradient, the same on every process, is not finite."""
        trainer = self._trainer
        norm = self.norm.full_tensor() if isinstance(self.norm, DTensor) else self.norm
        # The one wait of a step for its device.
        if norm is None or math.isfinite(float(norm)):
            return
        means = [
            _Means(batch.records.lines, {name: float(part) for name, part in parts.items()})
            for batch, parts in zip(self.batches, self._parts, strict=True)
        ]
        if trainer.accelerator.num_processes > 1:
            means = gather_object(means)
        faulty = {name: value for of_batch in means for name, value in of_batch.not_finite.items()}
        if getattr(trainer.accelerator, "scaler", None) is not None and not faulty:
            # Under fp16 the loss scale was too large; the scaler skips this step and lowers the scale.
            return
        faults = [f"{TERMS[name].label if name in TERMS else name} is {value}" for name, value in faulty.items()]
        fault = " and ".join(faults) or "the gradient is not finite (the losses are)"
        lines = chain(*(of_batch.lines for of_batch in means if of_batch.not_finite or not faulty))
        records = ", ".join(f"{trainer.source}:{line}" for line in islice(dict.fromkeys(lines), NAMED_RECORDS))
        trainer.model_wrapped.zero_grad()
        self.check_weights(state.global_step)
        raise UserError(
            f"step {state.global_step + 1}: {fault}, with {records}; begin again without these records or with a lower "
            f"`learning_rate`; {resume_hint(args.output_dir)}"
        )

    def check_weights(self, step: int) -> None:
        """Raise ``UserError`` on every process if a weight is not finite: no checkpoint or run may hold it."""
        trainer = self._trainer
        # Each process checks its own part of a sharded weight.
        local = (p.to_local() if isinstance(p, DTensor) else p for p in trainer.model.parameters())
        # Stacked, so that the device is waited for once, not once a weight.
        finite = [all_finite(part).to(trainer.args.device) for part in local]
        if trainer.total([float(bool(finite) and not bool(torch.stack(finite).all()))])[0]:
            raise UserError(
                f"step {step}: the weights are not finite any more, so they are not saved; begin again with a lower "
                f"`learning_rate`, or in another precision; {resume_hint(trainer.args.output_dir)}"
            )
