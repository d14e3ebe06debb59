"""Bytes of one training process, each part by one formula, from shapes and dtypes alone.

With N weights, n of them trained, w bytes a weight, and s, g, z the number of processes that weights, gradients and
optimizer states are sharded over (1 where they are not):

- weights: ``N w / s``; quantized ones 0.516 (4 bits with their scales) or 1 byte each;
- gradients: ``n w / g``, and as much again for the buckets of DDP;
- optimizer states: ``n a b / z``, see :data:`OPTIMIZERS`;
- averaged weights (``--target_grad ema``): ``n w``;
- activations: what a forward pass of the largest micro-batch leaves for the backward pass, see :func:`activations`.

Not in it: blocks that FSDP gathers while they are in use, temporary tensors of the backward pass, what kernels use
inside, and what the allocator and the device's libraries hold.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepjepa.batch.collate import Batch
from stepjepa.compute.shapes import empty_batch, without_values
from stepjepa.models.lm_head import LMHead
from stepjepa.objectives.objective import Objective, jepa_loss

if TYPE_CHECKING:
    from transformers import TrainingArguments

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
"""Optimizer -> values that it keeps for each trained weight, and the bytes of each (None: those of the weight)."""


@dataclass(frozen=True)
class Sharding:
    """Number of processes that each part is spread over, by FSDP or DeepSpeed's ZeRO.

    Attributes:
        name: empty for none.
        weights: s.
        gradients: g.
        states: z.
        master: trained weights are kept in float32 under mixed precision: by FSDP in their place (``instead``), by
            DeepSpeed ``beside`` those of 16 bits.
    """

    name: str = ""
    weights: int = 1
    gradients: int = 1
    states: int = 1
    master: str = ""

    @classmethod
    def of(cls, args: TrainingArguments, deepspeed: dict[str, Any] | None, processes: int) -> Sharding:
        """What the arguments ask for."""
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
    """Bytes that a process keeps from step to step, by part.

    Args:
        model: on the meta device or a real one, neither sharded nor quantized.
        optim: as ``TrainingArguments.optim``; the states of one that is not in :data:`OPTIMIZERS` are left out.
        processes: number of them.
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
    """Follows every tensor that an operation returns while it is entered, also of shapes alone.

    Args:
        model: its parameters and buffers are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._own:
                    self._seen[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return result

    @property
    def total(self) -> int:
        """Bytes that something still refers to."""
        return sum(size for storage, size in self._seen.values() if storage() is not None)


def activations(model: nn.Module, batch: Batch, objective: Objective, mixed: torch.dtype | None = None) -> int | None:
    """Bytes that are kept between the forward and the backward pass of a micro-batch, found on shapes alone.

    Args:
        model: on the meta device or a real one, set up for the objective; gradient checkpointing switched on or off.
        batch: of ``collate.Collator``.
        objective: the terms.
        mixed: dtype of autocast, or None.

    Returns:
        None for a model that decides by values what it computes (experts), which has no shapes alone.
    """
    autocast = torch.autocast("cpu", dtype=mixed) if mixed is not None else nullcontext()
    try:
        with without_values(model) as empty:
            LMHead(empty)  # tried out before the first pass, as the trainer does
            with LiveBytes(empty) as live, autocast:
                losses = jepa_loss(empty, empty_batch(batch), objective)
            found = live.total
            del losses
        return found
    except (RuntimeError, NotImplementedError, AssertionError):
        return None
