"""Restore the state of a resumed run that transformers loses: the sums of an open log line, the best checkpoint.

Without it the next log line would cover only the steps since the resume, and the path of the best checkpoint would be
relative to the folder and the working directory of the launch that saved it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from stepjepa.base.terminal import note
from stepjepa.training.interface import TrainerInterface

if TYPE_CHECKING:
    from transformers import TrainingArguments


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
            "meter": trainer.meter.state(),
        }
        torch.save(state, self._file(folder))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Restore the open log line and the path of the best checkpoint."""
        self.first_step = state.global_step
        if self.checkpoint is None:
            return
        self._restore_log_line(self._file(self.checkpoint))
        folder = Path(str(args.output_dir))
        if state.best_global_step:
            self._find_best(state, (folder, self.checkpoint.parent))

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

    def _find_best(self, state: TrainerState, folders: tuple[Path, ...]) -> None:
        """Set the path of the best checkpoint to the first folder that has it; the run's own folder comes first."""
        name = f"checkpoint-{state.best_global_step}"
        best = next((folder / name for folder in folders if (folder / name).is_dir()), None)
        if best is not None:
            state.best_model_checkpoint = str(best)
            return
        if state.is_world_process_zero:
            note(f"the best checkpoint so far, {name}, is gone; the best of the steps from here on counts")
        state.best_model_checkpoint = state.best_metric = state.best_global_step = None

    def mean_loss(self) -> float:
        """Return the mean loss of all steps, including those of earlier launches; for the end of training."""
        trainer = self._trainer
        steps: int = max(trainer.state.global_step - self.first_step, 1)
        return float(trainer._total_loss_scalar) / steps
