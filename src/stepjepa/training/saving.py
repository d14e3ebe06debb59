"""A trainer that saves and loads what belongs to a run beside the model: predictor head and averaged weights."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer

from stepjepa.models.ema import EmaEncoder
from stepjepa.models.predictor_head import load_head, save_head, split_state, without_head


class SavingTrainer(Trainer):
    """transformers' Trainer, whose model may have a predictor head that is no part of what is saved as the model.

    Attributes:
        ema: the averaged weights, saved with checkpoints alone, since only training needs them; None for none.
    """

    ema: EmaEncoder | None = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in Trainer, with the predictor head in a file of its own."""
        rest, own = (None, {}) if state_dict is None else split_state(state_dict)
        with without_head(self.model) as head:
            super()._save(output_dir, rest)
        # Trainer calls this on every process, and saves on one.
        if head is not None and self.args.should_save:
            save_head(own or head.state_dict(), output_dir or str(self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with without_head(self.model) as head:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if head is not None:
            load_head(head, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        with without_head(self.model) as head:
            super()._load_best_model()
        best = str(self.state.best_model_checkpoint)
        if head is not None:
            load_head(head, best)
        if self.ema is not None:
            self.ema.load(best)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.ema is not None and self.args.should_save:
            self.ema.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.ema is not None and checkpoint is not None:
            self.ema.load(checkpoint)
