"""Trainers of the check, and the time of their steps."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from transformers import TrainerCallback, TrainingArguments

from stepjepa import JepaTrainer
from stepjepa.training.flops import FlopModel

from .result import Skip, compiled, peak_memory, quiet, rounded, wait
from .world import World, build, jepa_config


def make_stopwatch() -> Any:
    """A callback that records the time at the end of each step."""

    class Stopwatch(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.graphs: list[int] = []
            self.on_step: Any = None
            self.warm = 4
            self.window: list[float] = []

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())
            self.graphs.append(compiled())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            number = state.global_step
            if number == self.warm:
                wait()
                peak_memory(reset=True)
                self.window = [time.perf_counter()]
            elif number == state.max_steps:
                wait()
                self.window.append(time.perf_counter())
            self.times.append(time.perf_counter())
            self.graphs.append(compiled())
            if self.on_step is not None:
                self.on_step(number)

        def summary(self) -> dict[str, Any]:
            steps = [(b - a) * 1e3 for a, b in pairwise(self.times)]
            clean = [ms for ms, a, b in zip(steps, self.graphs[:-1], self.graphs[1:], strict=True) if a == b][1:]
            late = clean[max(0, self.warm - 1) :] or clean or steps
            mean = (
                (self.window[1] - self.window[0]) * 1e3 / max(len(steps) - self.warm, 1)
                if len(self.window) > 1
                else None
            )
            return {
                "first": rounded(steps[0]), "median": rounded(statistics.median(late)), "mean": mean and rounded(mean),
                "least": rounded(min(late)), "most": rounded(max(steps[self.warm:] or steps)),
                "graphs": self.graphs[-1] - self.graphs[0],
                "graphs late": self.graphs[-1] - self.graphs[min(self.warm, len(self.graphs) - 1)],
                "peak GiB": peak_memory(),
            }  # fmt: skip

    return Stopwatch()


def arguments(world: World, *, steps: int, batch: int, logging: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(dir=world.scratch),
        "max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "bf16": world.cuda, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "steps" if logging else "no", "logging_steps": max(logging, 1),
        "use_cpu": not world.cuda, "gradient_checkpointing": False,
    } | more  # fmt: skip


def make_trainer(
    world: World, shape: str, arm: dict[str, Any], records: Any, *, steps: int, batch: int, attention: str = "sdpa",
    dtype: str = "float32", logging: int = 0, model: Any = None, **more: Any,
) -> tuple[Any, Any]:  # fmt: skip
    if attention == "flex_attention" and not world.cuda:
        raise Skip("no backward pass of FlexAttention on a CPU")
    config, watch = jepa_config(arm), make_stopwatch()
    more = {"dataloader_num_workers": 2 if world.cuda else 0} | more
    model = model or build(shape, world.tokenizer, world.device, dtype=dtype, attention=attention)
    data = records if hasattr(records, "dataset") else world.prepared(records, config)
    settings = TrainingArguments(**arguments(world, steps=steps, batch=batch, logging=logging, **more))
    with quiet():
        trainer = JepaTrainer(
            model, settings, config, train_dataset=data, processing_class=world.tokenizer, callbacks=[watch]
        )
    return trainer, watch


@contextlib.contextmanager
def flops_once() -> Iterator[None]:
    """Compute the FLOPs of a model once for each shape, since many trainers use the same shape."""
    before = FlopModel.__dict__["of"]
    known: dict[Any, FlopModel] = {}

    def of(cls: Any, model: Any, **options: Any) -> FlopModel:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        key = (model.config.hidden_size, model.config.num_hidden_layers, trained, tuple(sorted(options.items())))
        if key not in known:
            known[key] = before.__func__(cls, model, **options)
        return known[key]

    with patch.object(FlopModel, "of", classmethod(of)):
        yield
