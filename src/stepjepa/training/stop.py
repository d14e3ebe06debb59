"""The callback that ends a run on a signal, behind a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback

from stepjepa.base.signals import Interruptions, Stopped

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class StopCallback(TrainerCallback):
    """Saves a checkpoint at the end of the step in which a signal came to any process, then raises ``Stopped``.

    In the last step of an epoch it waits for the end of the epoch, so that the evaluation and the checkpoint of the
    epoch are not missing from the resumed run.
    """

    def __init__(self, request: Interruptions, processes: int = 1, device: torch.device | None = None) -> None:
        self._request, self._processes, self._device = request, processes, device
        self._number = 0

    @property
    def is_requested(self) -> bool:
        """Whether a signal was found, in any process."""
        return bool(self._number)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ask all processes for a request, unless the epoch ends here as well."""
        if not float(state.epoch).is_integer():
            self.on_epoch_end(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ask all processes for a request; if one has it, a checkpoint is saved."""
        if not self._number:
            self._number = self._request.first
            if self._processes > 1:
                numbers = torch.tensor(self._number, device=self._device)
                torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX)
                self._number = int(numbers.item())
        control.should_save |= self.is_requested

    # An evaluation may take long.
    on_evaluate = on_epoch_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Raise ``Stopped`` once the checkpoint is saved."""
        if self._number:
            raise Stopped(self._number, by_all=True)
