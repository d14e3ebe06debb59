"""Restore the state of a resumed run that transformers loses: the sums of an open log line, the best checkpoint.

Without it the next log line would cover only the steps since the resume, and the path of the best checkpoint would be
relative to the folder and the working directory of the launch that saved it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from stepjepa.base.files import json_at
from stepjepa.base.terminal import note
from stepjepa.training.interface import TrainerInterface

if TYPE_CHECKING:
    from transformers import TrainingArguments

BestBy = tuple[str, bool] | None
"""Metric by which the best checkpoint is chosen, and whether the greatest value is best; None without a metric."""


class ResumeCallback(TrainerCallback):
    """Saves the sums of an open log line with each checkpoint, and restores them when training begins.

    Attributes:
        checkpoint: the checkpoint that this launch resumes; None for a new run.
        first_step: the step after which ``train_loss`` is averaged.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self.checkpoint: Path | None = None
        self.first_step = 0

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
            "meter": trainer.meter.state(),
        }
        torch.save(state, self._file(folder))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Restore the open log line, the path of the best checkpoint, and how often this launch logs and saves."""
        self.first_step = state.global_step
        if self.checkpoint is None:
            return
        # The state of the checkpoint holds the logging_steps, eval_steps and save_steps of its own launch.
        state.compute_steps(args, state.max_steps)
        self._restore_log_line(self._file(self.checkpoint))
        self._find_best(args, state, self.checkpoint)

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
        folders = (Path(str(args.output_dir)), checkpoint.parent)
        # Read again, since Trainer clears the path if nothing is there.
        path = json_at(checkpoint / "trainer_state.json").get("best_model_checkpoint")
        recorded = None if path is None else Path(str(path)).name
        best, is_best = recorded and _in_one_of(folders, recorded), self._best_by(checkpoint, args) == _metric(args)
        if is_best and (best or recorded is None):
            # None if the best evaluation so far was at a step that is not saved.
            state.best_model_checkpoint = best and str(best)
            return
        saved = {step: value for step, value in _evaluations(args, state).items() if _in_one_of(folders, _named(step))}
        choose = max if args.greater_is_better else min
        step = choose(saved, key=lambda step: saved[step]) if saved else None
        state.best_global_step = step
        state.best_metric = None if step is None else saved[step]
        state.best_model_checkpoint = None if step is None else str(_in_one_of(folders, _named(step)))
        if state.is_world_process_zero and recorded is not None and args.metric_for_best_model is not None:
            fault = "is gone" if is_best else "was chosen by another metric"
            now = "the best of the steps from here on counts" if step is None else f"now it is {_named(step)}"
            note(f"the best checkpoint so far, {recorded}, {fault}; {now}")

    def _best_by(self, checkpoint: Path, args: TrainingArguments) -> BestBy:
        """Return the metric by which the best checkpoint was chosen that the state of a checkpoint has."""
        # One of another process: they have the same, and this process may be a new one.
        for file in sorted(checkpoint.glob("log_line_*.pt")):
            by = torch.load(file, map_location="cpu", weights_only=True).get("best_by", _metric(args))
            return None if by is None else tuple(by)
        return _metric(args)

    def mean_loss(self) -> float:
        """Return the mean loss of all steps, including those of earlier launches; for the end of training."""
        trainer = self._trainer
        steps: int = max(trainer.state.global_step - self.first_step, 1)
        return float(trainer._total_loss_scalar) / steps


def _metric(args: TrainingArguments) -> BestBy:
    """Return the metric by which a launch chooses the best checkpoint."""
    name = args.metric_for_best_model
    return None if name is None else (f"eval_{name.removeprefix('eval_')}", bool(args.greater_is_better))


def _evaluations(args: TrainingArguments, state: TrainerState) -> dict[int, float]:
    """Return the metric of each evaluation so far, by step; none for a metric that a callback adds."""
    by = _metric(args)
    return {} if by is None else {line["step"]: line[by[0]] for line in state.log_history if by[0] in line}


def _named(step: int) -> str:
    return f"checkpoint-{step}"


def _in_one_of(folders: Sequence[Path], name: str) -> Path | None:
    """Return the checkpoint of this name in the first folder that has it; None if none has."""
    return next((folder / name for folder in folders if (folder / name).is_dir()), None)
