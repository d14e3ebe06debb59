"""Estimated memory of one training process in bytes, one formula for each part, from shapes and dtypes alone.

With N weights, n of them trained, w bytes per weight, and s, g, z the number of processes over which weights, gradients
and optimizer states are sharded (1 if they are not):

- weights: ``N w / s``; a quantized weight takes 0.516 bytes (4 bits and scales) or 1 byte (8 bits);
- gradients: ``n w / g``, and the same again for the buckets of DDP;
- optimizer states: ``n a b / z``, for a values of b bytes per trained weight, see :data:`OPTIMIZERS`;
- averaged weights (``--target_grad ema``): ``n w``;
- activations: ``T w sum(i + o)``, for T tokens, over the matrices of all blocks, which read i and write o values a
  token; with checkpointing of B blocks of width D: ``T w B D``, and the sum over one block. An estimate from below:
  within a third for Llama and its kin, far less than what GPT-2 keeps.

Not included: blocks that FSDP gathers while they are in use, logits, temporary tensors of the backward pass and of
kernels, and the memory of the allocator and of the device's libraries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from stepjepa.models.architecture import find_decoder, has_experts

QUANTIZED = {"4bit": 0.516, "8bit": 1.0}
"""Bytes of a quantized weight."""

OPTIMIZERS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), (2, None)),
    **dict.fromkeys(("adagrad", "rmsprop"), (1, None)),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), (2, 1)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), (1, 1)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), (1, 4)),
    "paged_adamw_32bit": (2, 4),
    "sgd": (0, None),
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
    """Bytes that a process keeps between steps, by part; without the states of an optimizer not in :data:`OPTIMIZERS`.

    Args:
        model: on any device, meta included; neither sharded nor quantized yet.
        optim: as ``TrainingArguments.optim``.
        processes: number of processes.
        sharding: of them.
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


def activations(model: nn.Module, tokens: int, *, mixed: bool = False, checkpointing: bool = False) -> int | None:
    """Bytes kept between the forward and the backward pass of a micro-batch of so many ``tokens``, padding included.

    ``mixed`` where the pass runs in 16 bits, whatever the weights' dtype. None for a mixture of experts, of which it is
    not known which token meets which.
    """
    decoder: Any = find_decoder(model)
    if has_experts(model):
        return None
    width = 2 if mixed else torch.finfo(decoder.dtype).bits // 8
    inner = [pair for each in decoder.children() if isinstance(each, nn.ModuleList) for pair in each.named_parameters()]
    matrices = [weight for name, weight in inner if weight.ndim == 2 and "lora_" not in name]
    values = sum(sum(each.shape) for each in matrices)
    blocks = int(decoder.config.num_hidden_layers)
    return tokens * width * (blocks * decoder.config.hidden_size + values // blocks if checkpointing else values)
