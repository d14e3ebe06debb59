"""TensorBoard files in the run folder: one curve of a run, however often it was resumed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.integrations import TensorBoardCallback

if TYPE_CHECKING:
    from transformers import Trainer

FOLDER = "tensorboard"
"""In the run folder."""


def has_tensorboard() -> bool:
    """Whether its package is installed."""
    return importlib.util.find_spec("tensorboard") is not None


class RunTensorBoard(TensorBoardCallback):
    """transformers' callback, with the files in one folder of the run.

    A resumed run goes on in the same folder: what was logged after its checkpoint is marked as void there, since those
    steps are run again. The first file is made with the first line of logs, so that a run that could not begin leaves
    none.

    Args:
        objective: the configuration of the objective, shown as a text beside the curves.
    """

    def __init__(self, objective: dict[str, Any]) -> None:
        super().__init__()
        # None, or what TENSORBOARD_LOGGING_DIR says.
        self.logging_dir: str | None
        self._objective = objective
        self._resumed_at: int | None = None
        self._training = False

    @classmethod
    def install(cls, trainer: Trainer, objective: dict[str, Any]) -> None:
        """Take the place of the callback that ``--report_to tensorboard`` made, if there is one."""
        if "tensorboard" in trainer.args.report_to and trainer.pop_callback(TensorBoardCallback) is not None:
            trainer.add_callback(cls(objective))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where a resumed run goes on."""
        self._training = True
        self._resumed_at = state.global_step or None
        self._model = kwargs.get("model")
        if self.logging_dir is None:
            self.logging_dir = str(Path(args.output_dir) / FOLDER)

    def _init_summary_writer(self, args: Any) -> None:
        if self.logging_dir is None:
            self.logging_dir = str(Path(args.output_dir) / FOLDER)
        after = None if self._resumed_at is None else self._resumed_at + 1
        self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=after)
        if self._training and after is None:
            self.tb_writer.add_text("args", args.to_json_string())
            self.tb_writer.add_text("objective", json.dumps(self._objective, indent=2))
        # What comes after the end is one more line of the same run.
        self._resumed_at = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line; outside training nothing stays open."""
        super().on_log(args, state, control, logs=logs, **kwargs)
        if not self._training:
            super().on_train_end(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the file."""
        self._training = False
        super().on_train_end(args, state, control, **kwargs)
