"""Estimate the memory of a process in bytes, part by part, from shapes and dtypes.

With N weights, n of them trained, w bytes per weight, and s, g, z the number of processes over which weights, gradients
and optimizer states are sharded (1 if they are not):

- weights: ``N w / s``; a quantized weight takes 0.516 bytes (4 bits and scales) or 1 byte (8 bits);
- gradients: ``n w / g``, and the same again for the buckets of DDP;
- optimizer states: ``n a b / z``, for a values of b bytes per trained weight, see :data:`OPTIMIZERS`;
- averaged weights (``target_grad ema``): ``n w``, and ``4 n`` again where w is less than 4, since they are averaged in
  float32;
- activations: ``T w sum(i + o)``, for T tokens, over the matrices of all blocks, which read i and write o values a
  token; with checkpointing of C blocks of width D: ``T w C D`` unless they are offloaded, and the sum over the other
  blocks and one more. A lower bound: within a third for Llama and similar models (two fifths under autocast), far too
  low for GPT-2;
- 16-bit copies of weights: two bytes for each float32 weight of these matrices, which autocast converts and autograd
  keeps, unless the weights are sharded or quantized; with checkpointing those of the other blocks and of one more.

Not included: blocks that FSDP gathers while they are in use, logits, temporary tensors of the backward pass and of
kernels, and the memory of the allocator and of the device's libraries.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import Tensor, nn

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.models.architecture import HEADS, find_decoder, has_experts
from stepjepa.training.recomputation import Recomputation

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from stepjepa.config.jepa import Quantization

QUANTIZED: dict[Quantization, float] = {"4bit": 0.516, "8bit": 1.0}
"""Bytes of a quantized weight."""

OPTIMIZERS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), (2, None)),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), (2, 1)),
    "sgd": (0, None),
}
"""Optimizer -> number of values per trained weight, and bytes per value (None: those of the weight)."""


class Sharding(NamedTuple):
    """Number of processes over which each part is sharded, by FSDP or DeepSpeed's ZeRO: s, g and z above."""

    weights: int
    gradients: int
    states: int
    # Float32 master weights in mixed precision: instead of 16-bit weights (FSDP) or beside them (DeepSpeed).
    master: Literal["instead", "beside"] | None = None

    @classmethod
    def of(cls, args: TrainingArguments, deepspeed: str | JsonObject | None, processes: int) -> Sharding | None:
        """Return the sharding of a run; None without.

        Args:
            args: the Trainer's arguments; ``fsdp`` switches FSDP on.
            deepspeed: DeepSpeed's configuration, a file or an object; None without.
            processes: number that train together.

        Raises:
            UserError: DeepSpeed's configuration can't be read.
        """
        mixed = args.bf16 or args.fp16
        if deepspeed is not None:
            try:
                stage = HfDeepSpeedConfig(deepspeed).get_value("zero_optimization.stage", 0)
            except (ValueError, AttributeError, OSError) as error:
                raise UserError(f"deepspeed: can't be read as a JSON object ({error})") from None
            weights, gradients, states = (processes if stage >= least else 1 for least in (3, 2, 1))
            return cls(weights, gradients, states, "beside" if mixed else None)
        return cls(processes, processes, processes, "instead" if mixed else None) if args.fsdp else None


def resident_bytes(
    model: nn.Module,
    optim: str,
    *,
    processes: int = 1,
    sharding: Sharding | None = None,
    quantized: Quantization | None = None,
    ema: bool = False,
) -> dict[str, int]:
    """Return the bytes that a process keeps between steps, by part.

    Args:
        model: on any device, meta included; neither sharded nor quantized yet.
        optim: name of the optimizer; its states are counted if it is in :data:`OPTIMIZERS`.
        processes: number that train together.
        sharding: of the run; None without.
        quantized: the quantization of frozen weights in the run; None without.
        ema: an average of the weights is kept (``target_grad ema``).
    """
    shards = sharding or Sharding(1, 1, 1)
    head = model.get_output_embeddings()  # type: ignore[operator]  # a method of every PreTrainedModel
    # bitsandbytes quantizes frozen linear layers other than the head.
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    packed = {id(weight) for weight in linear if not weight.requires_grad}

    def size(tensor: Tensor) -> float:
        if quantized is not None and id(tensor) in packed:
            return tensor.numel() * QUANTIZED[quantized]
        width = 2 if shards.master == "beside" else tensor.element_size()
        return tensor.numel() * (max(4, width) if shards.master == "instead" and tensor.requires_grad else width)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count, trained_size = sum(parameter.numel() for parameter in trained), sum(map(size, trained))
    parts = {
        "weights": sum(map(size, model.parameters())) / shards.weights,
        "gradients": trained_size / shards.gradients,
    }
    if optim in OPTIMIZERS:
        values, width = OPTIMIZERS[optim]
        beside = 4 * count if shards.master == "beside" else 0
        states = values * (count * width if width is not None else beside or trained_size)
        parts["optimizer states"] = (states + beside) / shards.states
    if processes > 1 and sharding is None:
        parts["buckets of DDP"] = parts["gradients"]
    if ema:
        copies = [(size(parameter), 4 * parameter.numel()) for parameter in averaged(model)]
        parts["averaged weights"] = sum(own + in_float32 * (own < in_float32) for own, in_float32 in copies)
    return {name: round(value) for name, value in parts.items()}


def averaged(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that ``target_grad ema`` averages: the trained ones, except heads of terms."""
    named = model.named_parameters()
    return [parameter for name, parameter in named if parameter.requires_grad and not name.startswith(f"{HEADS}.")]


def _blocks(decoder: Any, recomputed: Recomputation | None) -> tuple[int, int, int]:
    """Return the number of blocks, of those whose values are in memory at once, and of those that keep their input."""
    blocks = int(decoder.config.num_hidden_layers)
    if recomputed is None:
        return blocks, blocks, 0
    checkpointed = math.ceil(blocks / recomputed.every_n_layers)
    return blocks, blocks - checkpointed + 1, 0 if recomputed.offload else checkpointed


def activations(
    model: nn.Module, tokens: int, *, mixed: bool = False, recomputed: Recomputation | None = None
) -> int | None:
    """Return the bytes kept between forward and backward pass of a micro-batch; None for a mixture of experts.

    Args:
        model: on any device.
        tokens: of the micro-batch, padding included.
        mixed: the pass runs in 16 bits under autocast.
        recomputed: the blocks that are recomputed in the backward pass; None for none.
    """
    if has_experts(model):
        return None
    decoder: Any = find_decoder(model)
    width = 2 if mixed else torch.finfo(decoder.dtype).bits // 8
    values = sum(sum(weight.shape) for name, weight in _matrices(decoder) if "lora_" not in name)
    blocks, whole, inputs = _blocks(decoder, recomputed)
    return tokens * width * (inputs * int(decoder.config.hidden_size) + values * whole // blocks)


def converted_bytes(model: nn.Module, *, recomputed: Recomputation | None = None) -> int:
    """Return the bytes of the 16-bit copies of float32 weights that autocast makes, and that the backward pass needs.

    Arguments are those of :func:`activations`.
    """
    decoder: Any = find_decoder(model)
    size = sum(2 * weight.numel() for _, weight in _matrices(decoder) if weight.dtype == torch.float32)
    blocks, whole, _ = _blocks(decoder, recomputed)
    return size * whole // blocks


def _matrices(decoder: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the matrices of all blocks of a decoder, by name."""
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    return [pair for layers in lists for pair in layers.named_parameters() if pair[1].ndim == 2]
