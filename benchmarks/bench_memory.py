"""What a process of ``profile_memory.py`` does: train one arm for some steps, and say what its memory went to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_arms import Arm
from bench_training import make_trainer, peak_mib
from torch import Tensor, nn
from transformers import TrainerCallback

from stepjepa.compute.live_memory import LiveMemory
from stepjepa.data.records import read_records

MIB = 2**20
# AdamW keeps two numbers for every weight.
MOMENTS = 2
LOGITS, MASKS, GRADIENTS, ACTIVATIONS = "logits", "masks", "gradients under way", "activations"


class Ending(TrainerCallback):
    """Ends a run after some steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End it."""
        control.should_training_stop = state.global_step >= self._steps


def kind_of(model: nn.Module, vocabulary: int) -> Callable[[Tensor], str]:
    """Tells tensors apart by their shapes.

    Args:
        model: whose weights' shapes are those of gradients.
        vocabulary: rows of its head. As many columns are logits; so are more than any layer gives, since TRL makes
            logits of a large vocabulary some columns at a time.
    """
    shapes = {parameter.shape for parameter in model.parameters()}
    widest = max(size for shape in shapes for size in shape if size != vocabulary)

    def kind(tensor: Tensor) -> str:
        if tensor.shape in shapes:
            return GRADIENTS
        if tensor.dim() > 1 and (tensor.shape[-1] == vocabulary or tensor.shape[-1] > widest):
            return LOGITS
        square = tensor.dim() > 2 and tensor.shape[-1] == tensor.shape[-2]
        return MASKS if square or tensor.dtype == torch.bool else ACTIVATIONS

    return kind


def resident_memory(task: dict[str, Any]) -> dict[str, Any]:
    """Train, and measure the peak of the process.

    Args:
        task: as of ``bench_training.measure``, with ``steps`` instead of ``warmup`` and ``seconds``.

    Returns:
        ``before`` and ``peak``: MiB of the process before training, weights included, and at the most.
    """
    trainer, _ = make_trainer(Arm(**task["arm"]), task, read_records(Path(task["folder"]) / "records.jsonl"))
    trainer.add_callback(Ending(task["steps"]))
    before = peak_mib()
    trainer.train()
    return {"before": before, "peak": peak_mib()}


def counted_memory(task: dict[str, Any]) -> dict[str, Any]:
    """Train, and count the tensors of every step.

    No weight changes meanwhile, since the count takes every gradient as soon as it is whole.

    Args:
        task: as of :func:`resident_memory`.

    Returns:
        In MiB: ``weights``, ``optimizer``, ``step`` (the most that a step holds beside them, gradients included) and
        ``kinds``: what it holds of each kind when it holds most without whole gradients.
    """
    trainer, _ = make_trainer(Arm(**task["arm"]), task, read_records(Path(task["folder"]) / "records.jsonl"))
    trainer.add_callback(Ending(task["steps"]))
    model: Any = trainer.model
    run_step = trainer.training_step
    found: list[LiveMemory] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        # What earlier steps left in cycles is not of this one.
        gc.collect()
        with LiveMemory(model, kind_of(model, len(model.get_output_embeddings().weight))) as memory:
            result = run_step(*args, **kwargs)
        found.append(memory)
        return result

    trainer.training_step = counted
    trainer.train()
    most = max(found, key=lambda memory: memory.peak_with_gradients)
    weights = list(model.parameters())
    return {
        "weights": sum(weight.nbytes for weight in weights) / MIB,
        "optimizer": MOMENTS * sum(weight.nbytes for weight in weights if weight.requires_grad) / MIB,
        "step": most.peak_with_gradients / MIB,
        "kinds": {kind: most.at_peak.get(kind, 0) / MIB for kind in (LOGITS, MASKS, GRADIENTS, ACTIVATIONS)},
    }
