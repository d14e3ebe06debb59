"""What a process of ``profile_step.py`` does: train one arm under torch's profiler and sort its operations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench_arms import Arm
from bench_training import Stopwatch, count_batches, make_trainer
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from stepjepa.data.records import read_records

# Kind of work -> how its operations are called; the first that fits.
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "optimizer": ("aten::_fused_adamw", "Optimizer."),
    "element by element": ("aten::",),
}
REST = "Python, autograd, bookkeeping"


class Window(TrainerCallback):
    """Profiles some whole steps after the warm-up, and ends the run.

    Args:
        warmup: steps before.
        steps: steps to profile.
        stopwatch: has counted the examples' own text.
    """

    def __init__(self, warmup: int, steps: int, stopwatch: Stopwatch) -> None:
        self._warmup = warmup
        self._steps = steps
        self._stopwatch = stopwatch
        self._profiler = profile(activities=[ProfilerActivity.CPU])
        self._begin = 0.0
        self._text = 0
        self.seconds = 0.0
        self.text_tokens = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin or end."""
        if state.global_step == self._warmup:
            self._text = self._stopwatch.text
            self._profiler.start()
            self._begin = time.perf_counter()
        elif state.global_step == self._warmup + self._steps:
            self.seconds = time.perf_counter() - self._begin
            self._profiler.stop()
            self.text_tokens = self._stopwatch.text - self._text
            control.should_training_stop = True

    def operations(self) -> list[tuple[str, float, int]]:
        """Name, seconds of its own, and number of calls of every operation, the dearest first."""
        found = [(event.key, event.self_cpu_time_total / 1e6, event.count) for event in self._profiler.key_averages()]
        return sorted(found, key=lambda operation: -operation[1])


def sort_by_kind(operations: list[tuple[str, float, int]], seconds: float) -> dict[str, float]:
    """Seconds of each kind of work; what no operation of torch's took is ``REST``.

    Args:
        operations: of :meth:`Window.operations`.
        seconds: of all steps, by the clock.
    """
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, taken, _ in operations:
        kind = next((kind for kind, names in KINDS.items() if name.startswith(names)), None)
        if kind is not None:
            kinds[kind] += taken
    return {**kinds, REST: max(seconds - sum(kinds.values()), 0.0)}


def profile_arm(task: dict[str, Any]) -> dict[str, Any]:
    """Profile one arm.

    Args:
        task: as of ``bench_training.measure``, with ``steps`` instead of ``seconds``.

    Returns:
        ``seconds`` and ``kinds``, for each token of the records' own text, and the dearest ``operations`` with their
        share of the time.
    """
    arm = Arm(**task["arm"])
    records = read_records(Path(task["folder"]) / "records.jsonl")
    trainer, _ = make_trainer(arm, task, records)
    stopwatch = Stopwatch(task["warmup"], float("inf"))
    window = Window(task["warmup"], task["steps"], stopwatch)
    count_batches(trainer, stopwatch)
    trainer.add_callback(window)
    trainer.train()
    operations = window.operations()
    kinds = sort_by_kind(operations, window.seconds)
    return {
        "seconds": window.seconds / window.text_tokens,
        "kinds": {kind: taken / window.text_tokens for kind, taken in kinds.items()},
        "operations": [
            {"name": name, "share": taken / window.seconds, "calls": calls} for name, taken, calls in operations[:12]
        ],
    }
