"""A run that is asked to stop is saved at the end of its step, and left."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from stepjepa.signals import OneRequest, Stopped


class StopCallback(TrainerCallback):
    """Has a checkpoint saved at the end of the step in which a signal came, and ends training when it is there.

    All processes do so at the same step, whichever of them was sent the signal. A step that ends an epoch is ended with
    what the epoch's end brings, evaluation among it, and an evaluation is ended too, so that nothing is missing from a
    run that goes on later.

    Args:
        request: entered while training is.
        processes: how many train together.
        device: of this one.

    Raises:
        Stopped: out of ``Trainer.train``, after the checkpoint was written.
    """

    def __init__(self, request: OneRequest, processes: int = 1, device: torch.device | None = None) -> None:
        self._request, self._processes, self._device = request, processes, device
        self._number = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask, unless the epoch ends here as well."""
        if not float(state.epoch).is_integer():
            self._ask(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask."""
        self._ask(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask, since an evaluation may take long."""
        self._ask(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave."""
        if self._number:
            raise Stopped(self._number)

    def _ask(self, control: Any) -> None:
        if not self._number:
            asked = self._request.first
            if self._processes > 1:
                numbers = torch.tensor(asked, device=self._device)
                torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX)
                asked = int(numbers.item())
            self._number = asked
        if self._number:
            control.should_save = True
