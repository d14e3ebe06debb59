"""The settings of the objective in Weights & Biases, beside those of Trainer, to filter and to group runs by."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from transformers.trainer_callback import TrainerCallback

from stepjepa.config.jepa import JepaConfig

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class ObjectiveInTracker(TrainerCallback):
    """Adds a ``JepaConfig`` to the configuration of the run in W&B, in columns such as ``jepa.lbd``.

    transformers' own callback, which makes the run in W&B, knows the arguments of Trainer and the model alone.
    """

    def __init__(self, config: JepaConfig) -> None:
        self._config = config

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Add the settings; the callbacks of trackers were called before, and only the first process has a run."""
        # Imported by transformers if it reports there.
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None and "wandb" in args.report_to:
            run.config.update({"jepa": self._config.to_dict()}, allow_val_change=True)
