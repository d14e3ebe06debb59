"""A trainer that logs the parts of the loss, the monitors and the speed, over the steps since the last line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer

from stepjepa.config import JepaConfig
from stepjepa.objectives.monitors import Window, share
from stepjepa.objectives.objective import Objective

# Names of the running sums of a window beside the parts of the loss, as they travel between processes.
_SUMS = ["steps", "jepa_steps", "matched", "shuffled", "pairs", "crossings"]
_SUMS += ["tokens", "records", "records_with_views", "records_without_pair"]


class LoggedTrainer(Trainer):
    """The part of ``JepaTrainer`` that logs.

    Attributes:
        num_tokens: tokens trained on so far, over all processes, padding not counted.
        skipped: steps left out so far, see ``GuardedTrainer``.
    """

    jepa: JepaConfig
    objective: Objective
    num_tokens: float = 0.0
    skipped: int
    _window: Window
    _window_start: float
    _window_empty: bool = False
    _left_out: bool = False
    _lbd: float

    def _start_window(self) -> None:
        self._window.reset()
        self._window_start = time.perf_counter()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the monitors and the speed to a line of training logs."""
        if "loss" in logs:
            self.store_flos()
            logs = {**logs, **self._window_metrics()}
            if self._window_empty:
                # All of its steps were left out: what is not measured is not zero.
                del logs["loss"]
        super().log(logs, start_time)

    def _window_metrics(self) -> dict[str, float]:
        names = ["loss", *self.objective.names, *_SUMS]
        sums = dict(zip(names, self._total(self._window.totals(names)), strict=True))
        world = self.accelerator.num_processes
        seconds = max(time.perf_counter() - self._window_start, 1e-9)
        steps = sums["steps"] / world
        self._window_empty = steps == 0
        self._add_tokens(sums["tokens"])
        # The Trainer divides its sum by all steps, those that were left out among them.
        left_out, self._left_out = self._left_out, False
        metrics: dict[str, float] = {
            **(share("loss", sums["loss"], steps) if left_out else {}),
            **({"nonfinite_steps": float(self.skipped)} if self.skipped else {}),
        }
        for name in ("lm_loss", "stp_loss"):
            if name in sums:
                metrics |= share(name, sums[name], steps)
        metrics |= {
            "num_tokens": self.num_tokens,
            "total_flos": self.state.total_flos,
            "tokens_per_second": sums["tokens"] / seconds,
            "records_per_second": sums["records"] / seconds,
        }
        if self.jepa.uses_views:
            metrics |= {
                **self._aligned_parts(sums, sums["jepa_steps"] / world),
                **share("matched_similarity", sums["matched"], sums["pairs"]),
                **share("shuffled_similarity", sums["shuffled"], sums["crossings"]),
                **self._window.geometry(),
                "pairs_per_second": sums["pairs"] / seconds,
                **share("without_pair_share", sums["records_without_pair"], sums["records_with_views"]),
            }
        self._window.reset()
        self._window_start = time.perf_counter()
        return metrics

    def _aligned_parts(self, sums: dict[str, float], steps: float) -> dict[str, float]:
        """Means over the steps that had views, and the weight where it changes."""
        named = [name for name in self.objective.names if name not in ("lm_loss", "stp_loss")]
        means: dict[str, float] = {}
        for name in named:
            means |= share(name, sums[name], steps)
        scheduled = self.jepa.lbd_schedule != "constant"
        return means | ({"lbd": self._lbd} if scheduled else {})

    def _total(self, values: Sequence[float]) -> list[float]:
        """Sums of some numbers over all processes."""
        # Sums of a window need more than the single precision that mps has.
        device = torch.device("cpu") if self.args.device.type == "mps" else self.args.device
        totals = torch.tensor(values, dtype=torch.float64, device=device)
        if self.accelerator.num_processes > 1:
            totals = self.accelerator.reduce(totals, "sum")
        summed: list[float] = totals.tolist()
        return summed

    def _add_tokens(self, tokens: float) -> None:
        if self.num_tokens == 0:
            # A resumed run goes on counting where its checkpoint was written.
            self.num_tokens = float(self.state.num_input_tokens_seen)
        self.num_tokens += tokens

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As in Trainer, with the tokens seen so far in the state."""
        (pending,) = self._total(self._window.totals(["tokens"]))
        self._add_tokens(0.0)
        self.state.num_input_tokens_seen = int(self.num_tokens + pending)
        super()._save_checkpoint(*args, **kwargs)
