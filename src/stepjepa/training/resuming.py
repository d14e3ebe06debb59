"""Restore the state of a resumed run that transformers loses: the sums of an open log line, the best checkpoint.

Without it the next log line would cover only the steps since the resume, and the path of the best checkpoint would be
relative to the folder and the working directory of the launch that saved it. What the user changes of the optimizer's
settings would have no effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from stepjepa.base.files import json_or_empty
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.store.folder import of_same_call
from stepjepa.training.group_settings import StartSettings, apply_settings
from stepjepa.training.interface import TrainerInterface

if TYPE_CHECKING:
    from transformers import TrainingArguments

BestBy = tuple[str, bool] | None
"""Metric by which the best checkpoint is chosen, and whether the greatest value is best; None without a metric."""


class ResumeCallback(TrainerCallback):
    """Saves the sums of an open log line and the optimizer's first settings with each checkpoint, and restores them.

    Attributes:
        first_step: the step after which ``train_loss`` is averaged.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self._start_settings = StartSettings()
        self._checkpoint: Path | None = None  # that the launch which begins resumes
        self.first_step = 0

    def begin(self, checkpoint: Path) -> None:
        """Begin a launch that resumes a checkpoint, whose optimizer is not loaded yet."""
        self._checkpoint = checkpoint
        self._start_settings.of(self._trainer.optimizer)

    def apply_settings(self) -> None:
        """Apply what this launch changes of the settings of the optimizer, whose state has been loaded."""
        assert self._checkpoint is not None
        trainer, before = self._trainer, _saved(self._checkpoint).get("start_settings")
        settings = self._start_settings.of(trainer.optimizer)
        apply_settings(settings, before, trainer.optimizer, trainer.lr_scheduler)

    def steps_before(self, checkpoint: Path) -> int | None:
        """Return the steps of earlier calls of ``train`` before those of a checkpoint; None if it does not say so."""
        before: int | None = _saved(checkpoint).get("steps_before")
        return before

    def _file(self, folder: Path) -> Path:
        """Return the file of this process in a checkpoint folder."""
        return folder / f"log_line_{self._trainer.args.process_index}.pt"

    def save(self, folder: Path) -> None:
        """Save the sums since the last log line into a checkpoint folder; every process saves its own."""
        trainer = self._trainer
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "processes": trainer.args.world_size,
            "loss": trainer._tr_loss.detach().cpu(),
            "loss_sum": trainer._total_loss_scalar,
            "logged_step": trainer._globalstep_last_logged,
            "first_step": self.first_step,
            "best_by": _metric(trainer.args),
            "steps_before": trainer.recorder.steps_before,
            "start_settings": self._start_settings.of(trainer.optimizer),
            "meter": trainer.meter.state(),
        }
        torch.save(state, self._file(folder))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Restore the open log line, the path of the best checkpoint, and how often this launch logs and saves."""
        self.first_step = state.global_step
        self._start_settings.of(self._trainer.optimizer)
        # A further call of ``train`` resumes nothing.
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            return
        # The state of the checkpoint holds the logging_steps, eval_steps and save_steps of its own launch.
        state.compute_steps(args, state.max_steps)
        self._restore_log_line(self._file(checkpoint))
        self._find_best(args, state, checkpoint)

    def _restore_log_line(self, file: Path) -> None:
        """Restore the sums of the open log line from a checkpoint's file.

        Checkpoints of earlier versions have none; one of another number of processes is ignored.
        """
        trainer = self._trainer
        if not file.is_file():
            return
        saved = torch.load(file, map_location="cpu", weights_only=True)
        if saved["processes"] != trainer.args.world_size:
            return
        trainer._tr_loss.copy_(saved["loss"])
        trainer._total_loss_scalar = saved["loss_sum"]
        trainer._globalstep_last_logged = saved["logged_step"]
        self.first_step = saved["first_step"]
        trainer.meter.restore(saved["meter"], trainer.args.device)

    def _find_best(self, args: TrainingArguments, state: TrainerState, checkpoint: Path) -> None:
        """Set the best checkpoint so far: by the metric of this launch, in the run folder or beside ``checkpoint``.

        The state has the best one by the metric of the launch that saved it, in the folder where that ran.
        """
        run = Path(str(args.output_dir))
        # Read again, since Trainer clears the path if nothing is there.
        path = json_or_empty(checkpoint / "trainer_state.json").get("best_model_checkpoint")
        # None if the best evaluation so far was at a step that is not saved.
        recorded = None if path is None else Path(str(path)).name
        best = None if recorded is None else _find(recorded, run, checkpoint)
        same_metric = _recorded_metric(checkpoint, args) == _metric(args)
        if same_metric and (recorded is None or best is not None):
            state.best_model_checkpoint = None if best is None else str(best)
            return
        _choose_best(args, state, run, checkpoint)
        if state.is_world_process_zero and recorded is not None and args.metric_for_best_model is not None:
            fault = "is gone" if same_metric else "was chosen by another metric"
            step = state.best_global_step
            now = "the best of the steps from here on counts" if step is None else f"now it is {_named(step)}"
            note(f"the best checkpoint so far, {recorded}, {fault}; {now}")

    def mean_loss(self) -> float:
        """Return the mean loss of all steps, including those of earlier launches; for the end of training."""
        trainer = self._trainer
        steps: int = max(trainer.state.global_step - self.first_step, 1)
        return float(trainer._total_loss_scalar) / steps


def _metric(args: TrainingArguments) -> BestBy:
    """Return the metric by which a launch chooses the best checkpoint."""
    name = args.metric_for_best_model
    return None if name is None else (f"eval_{name.removeprefix('eval_')}", bool(args.greater_is_better))


def _recorded_metric(checkpoint: Path, args: TrainingArguments) -> BestBy:
    """Return the metric by which the best checkpoint in the state of ``checkpoint`` was chosen."""
    by = _saved(checkpoint).get("best_by", _metric(args))
    return None if by is None else tuple(by)


def _saved(checkpoint: Path) -> JsonObject:
    """Return what a checkpoint holds beside the open log line of a process; empty for one of an early version."""
    # The file of any process will do: all hold the same, and this process may not have saved one.
    files = sorted(checkpoint.glob("log_line_*.pt"))
    return torch.load(files[0], map_location="cpu", weights_only=True) if files else {}


def _choose_best(args: TrainingArguments, state: TrainerState, run: Path, checkpoint: Path) -> None:
    """Set the best checkpoint of a state, in place: of all evaluated steps whose checkpoint is there.

    All is None if there is no such step.
    """
    evaluations = _evaluations(args, state)
    saved = [step for step in evaluations if _find(_named(step), run, checkpoint) is not None]
    step = (max if args.greater_is_better else min)(saved, key=lambda step: evaluations[step], default=None)
    state.best_global_step = step
    state.best_metric = None if step is None else evaluations[step]
    state.best_model_checkpoint = None if step is None else str(_find(_named(step), run, checkpoint))


def _evaluations(args: TrainingArguments, state: TrainerState) -> dict[int, float]:
    """Return the metric of each evaluation so far, by step; none for a metric that a callback adds."""
    by = _metric(args)
    return {} if by is None else {line["step"]: line[by[0]] for line in state.log_history if by[0] in line}


def _named(step: int) -> str:
    return f"checkpoint-{step}"


def _find(name: str, run: Path, checkpoint: Path) -> Path | None:
    """Return the checkpoint of this name in a run folder, or beside the one that is resumed; None if there is none."""
    return next((path for path in (run / name, of_same_call(checkpoint, name)) if path.is_dir()), None)
