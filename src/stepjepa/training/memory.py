"""Estimated memory of one training process in bytes, one formula for each part, from shapes and dtypes alone.

With N weights, n of them trained, w bytes per weight, and s, g, z the number of processes over which weights, gradients
and optimizer states are sharded (1 if they are not):

- weights: ``N w / s``; a quantized weight takes 0.516 bytes (4 bits and scales) or 1 byte (8 bits);
- gradients: ``n w / g``, and the same again for the buckets of DDP;
- optimizer states: ``n a b / z``, for a values of b bytes per trained weight, see :data:`OPTIMIZERS`;
- averaged weights (``--target_grad ema``): ``n w``;
- activations: the tensors that a forward pass keeps for the backward pass, see :func:`activations`.

Not included: blocks that FSDP gathers while they are in use, temporary tensors of the backward pass and of kernels,
and the memory of the allocator and of the device's libraries.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainingArguments

from stepjepa.batch.collate import Batch
from stepjepa.models.lm_head import LMHead
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.training.flops import NO_SHAPES, empty_batch, without_values

QUANTIZED = {"4bit": 0.516, "8bit": 1.0}
"""Bytes of a quantized weight."""

OPTIMIZERS: dict[str, tuple[int, int | None]] = {
    "adamw_torch": (2, None),
    "adamw_torch_fused": (2, None),
    "sgd": (0, None),
    "adagrad": (1, None),
    "rmsprop": (1, None),
    "adamw_8bit": (2, 1),
    "adamw_bnb_8bit": (2, 1),
    "paged_adamw_8bit": (2, 1),
    "paged_adamw_32bit": (2, 4),
    "lion_8bit": (1, 1),
    "lion_32bit": (1, 4),
    "paged_lion_8bit": (1, 1),
    "paged_lion_32bit": (1, 4),
}
"""Optimizer -> number of values per trained weight, and bytes per value (None: those of the weight)."""


class Sharding(NamedTuple):
    """Number of processes over which each part is sharded, by FSDP or DeepSpeed's ZeRO."""

    name: str = ""  # the kind of sharding; empty for none
    weights: int = 1  # s of the module's docstring
    gradients: int = 1  # g
    states: int = 1  # z
    # How float32 weights are kept for mixed precision: "instead" of those of 16 bits (FSDP), or "beside" (DeepSpeed).
    master: str = ""

    @classmethod
    def of(cls, args: TrainingArguments, deepspeed: dict[str, Any] | None, processes: int) -> Sharding:
        """The sharding that the arguments configure."""
        mixed = args.bf16 or args.fp16
        if deepspeed is not None:
            stage = int(deepspeed.get("zero_optimization", {}).get("stage", 0))
            weights, gradients, states = (processes if stage >= least else 1 for least in (3, 2, 1))
            return cls(f"ZeRO-{stage}", weights, gradients, states, "beside" if mixed else "")
        if args.fsdp:
            return cls("FSDP", processes, processes, processes, "instead" if mixed else "")
        return cls()


def kept_bytes(
    model: nn.Module,
    optim: str,
    *,
    processes: int = 1,
    sharding: Sharding | None = None,
    quantized: str | None = None,
    ema: bool = False,
) -> dict[str, int]:
    """Bytes that a process keeps between steps, by part.

    Args:
        model: on any device, meta included; neither sharded nor quantized.
        optim: as ``TrainingArguments.optim``; the states of an optimizer not in :data:`OPTIMIZERS` are left out.
        processes: number of processes.
        sharding: see :class:`Sharding`.
        quantized: ``4bit`` or ``8bit``, or None.
        ema: the target is encoded with averaged weights.
    """
    shards = sharding or Sharding()
    packed = {id(layer.weight) for layer in quantized_layers(model)} if quantized else set()

    def size(tensor: Tensor) -> float:
        if id(tensor) in packed:
            return tensor.numel() * QUANTIZED[str(quantized)]
        width = 2 if shards.master == "beside" else tensor.element_size()
        return tensor.numel() * (max(4, width) if shards.master == "instead" and tensor.requires_grad else width)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count, own = sum(parameter.numel() for parameter in trained), sum(map(size, trained))
    parts = {"weights": sum(map(size, model.parameters())) / shards.weights, "gradients": own / shards.gradients}
    if optim in OPTIMIZERS:
        values, width = OPTIMIZERS[optim]
        beside = 4 * count if shards.master == "beside" else 0
        states = values * (count * width if width is not None else beside or own)
        parts["optimizer states"] = (states + beside) / shards.states
    if processes > 1 and not shards.name:
        parts["buckets of DDP"] = parts["gradients"]
    if ema:
        parts["averaged weights"] = own
    return {name: round(value) for name, value in parts.items()}


def quantized_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers that bitsandbytes quantizes: frozen linear layers other than the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]  # a method of every PreTrainedModel
    linear = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return [each for each in linear if not each.weight.requires_grad]


class LiveBytes(TorchDispatchMode):
    """Tracks the storage of every tensor that an operation returns while the mode is active, but those of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and (storage := value.untyped_storage())._cdata not in self._own:
                self._seen[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return result

    @property
    def total(self) -> int:
        """Bytes of the tracked storages that are still referenced."""
        return sum(size for storage, size in self._seen.values() if storage() is not None)


def activations(model: nn.Module, batch: Batch, objective: Objective, mixed: torch.dtype | None = None) -> int | None:
    """Bytes kept between the forward and the backward pass of a micro-batch, found by a pass on fake tensors.

    Args:
        model: on any device, meta included, set up for the objective; gradient checkpointing as in the run.
        batch: a micro-batch of ``collate.Collator``.
        objective: the terms of the loss.
        mixed: dtype of autocast; None for no autocast.

    Returns:
        The bytes; None if the computation depends on values (experts), so that it can't run on fake tensors.
    """
    autocast = torch.autocast("cpu", dtype=mixed) if mixed is not None else nullcontext()
    try:
        with without_values(model) as empty:
            LMHead(empty)  # runs its test pass before the first forward pass, as in the trainer
            with LiveBytes(empty) as live, autocast:
                losses = jepa_loss(empty, empty_batch(batch), objective)
            found = live.total
            del losses
        return found
    except NO_SHAPES:
        return None
