"""Bytes that training keeps beside activations: weights, gradients, optimizer states, and what sharding leaves of them.

Sizes follow from shapes and dtypes alone, and are exact for what they name (tested against the tensors of real runs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from transformers import TrainingArguments

GIB = 2**30


Width = Callable[[Tensor], int]
"""Bytes of each value of a tensor."""


def nbytes(tensors: Iterable[Tensor], width: Width = Tensor.element_size) -> int:
    """Bytes of some tensors, each counted once."""
    return sum(tensor.numel() * width(tensor) for tensor in {id(t): t for t in tensors}.values())


def trained(model: nn.Module) -> list[Tensor]:
    """The parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# -- optimizer states --------------------------------------------------------------------------------------------------

# bitsandbytes keeps tensors below this size in float32, and a scale for every so many values of the others.
_SMALL, _BLOCK = 4096, 256

_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused")

# Optimizers of bitsandbytes -> states for each value, and whether they have 8 bits.
_BITSANDBYTES = {
    "adamw_bnb_8bit": (2, True),
    "adamw_8bit": (2, True),
    "paged_adamw_8bit": (2, True),
    "paged_adamw_32bit": (2, False),
    "lion_8bit": (1, True),
    "paged_lion_8bit": (1, True),
    "lion_32bit": (1, False),
    "paged_lion_32bit": (1, False),
}

MASTER = 4
"""Bytes of a weight in float32, which DeepSpeed keeps beside weights of 16 bits."""


def optimizer_bytes(model: nn.Module, optim: str, width: Width = Tensor.element_size) -> int | None:
    """Bytes of an optimizer's states once it has made a step.

    Args:
        model: gives the trained parameters, and which of them are embeddings.
        optim: as ``TrainingArguments.optim``.
        width: of the weights that it works on.

    Returns:
        None for an optimizer that is not known here.
    """
    parameters = trained(model)
    if optim in _ADAM:
        # Two averages in the weight's own dtype, and the number of steps.
        return sum(2 * p.numel() * width(p) + 4 for p in parameters)
    if optim == "sgd":
        return 0
    if optim in ("adagrad", "rmsprop"):
        return sum(p.numel() * width(p) + 4 for p in parameters)
    if optim == "adafactor":
        return sum(_adafactor(p, max(4, width(p))) + 4 for p in parameters)
    if optim in _BITSANDBYTES:
        states, small = _BITSANDBYTES[optim]
        # Trainer keeps the states of embeddings in 32 bits.
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        return sum(states * _eight_bit(p, small and id(p) not in embeddings) for p in parameters)
    return None


def _adafactor(parameter: Tensor, size: int) -> int:
    """Factored over the last two dimensions, in float32 at least."""
    if parameter.ndim < 2:
        return parameter.numel() * size
    *_, rows, columns = parameter.shape
    return parameter.numel() // (rows * columns) * (rows + columns) * size


def _eight_bit(parameter: Tensor, small: bool) -> int:
    if not small or parameter.numel() < _SMALL:
        return 4 * parameter.numel()
    return parameter.numel() + 4 * math.ceil(parameter.numel() / _BLOCK)


# -- quantized weights -------------------------------------------------------------------------------------------------

# Values that share a scale, and scales that share one in turn (double quantization).
_SCALED, _NESTED = 64, 256


def quantized_bytes(model: nn.Module, kind: str, width: Width = Tensor.element_size) -> int:
    """Bytes of all weights, those of linear layers (except the head and adapters) in 4 or 8 bits.

    Args:
        model: as ``shapes.empty_model`` builds it, not quantized.
        kind: ``4bit`` (NF4, double quantization) or ``8bit``, see ``quantization.quantization_options``.
        width: of the other weights.
    """
    weights = {id(layer.weight): layer.weight for layer in quantized_layers(model)}
    rest = nbytes((p for p in model.parameters() if id(p) not in weights), width)
    return rest + sum(_quantized(weight, kind) for weight in weights.values())


def quantized_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers that bitsandbytes would quantize: frozen linear layers other than the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]  # a method of every PreTrainedModel
    own = set() if head is None else {id(parameter) for parameter in head.parameters()}
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and id(module.weight) not in own
    ]


def _quantized(weight: Tensor, kind: str) -> int:
    if kind == "8bit":
        return weight.numel() + 4 * weight.shape[0]  # a scale for each row
    scales = math.ceil(weight.numel() / _SCALED)
    # Two values a byte, a byte for each scale, scales of scales and their mean, and both tables of values.
    return math.ceil(weight.numel() / 2) + scales + 4 * math.ceil(scales / _NESTED) + 4 + 4 * (16 + 256)


# -- sharding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharding:
    """Over how many processes each part is spread, by FSDP2 or DeepSpeed's ZeRO.

    Attributes:
        words: how it is called; empty for none.
        weights: shares of the weights.
        gradients: shares of the gradients.
        states: shares of the optimizer states, and of a master copy.
        upcasts: trained weights are kept in float32, whatever they were loaded as (FSDP under mixed precision).
        halves: weights are kept in the 16 bits of mixed precision, with a master copy in float32 (DeepSpeed).
        stays_whole: blocks that were brought together stay so until the backward pass.
        offloads: states, and with FSDP weights and gradients, are in the host's memory.
    """

    words: str = ""
    weights: int = 1
    gradients: int = 1
    states: int = 1
    upcasts: bool = False
    halves: bool = False
    stays_whole: bool = False
    offloads: bool = False


def choose_sharding(args: TrainingArguments, deepspeed: dict[str, Any] | None, processes: int) -> Sharding:
    """What the arguments ask for.

    Args:
        args: with ``fsdp`` and ``fsdp_config``.
        deepspeed: DeepSpeed's configuration, if there is one.
        processes: number of them.
    """
    mixed = args.bf16 or args.fp16
    if deepspeed is not None:
        zero = deepspeed.get("zero_optimization", {})
        stage = int(zero.get("stage", 0))
        weights, gradients, states = (processes if stage >= least else 1 for least in (3, 2, 1))
        offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        return Sharding(f"DeepSpeed ZeRO-{stage}", weights, gradients, states, halves=mixed, offloads=offloads)
    if not args.fsdp:
        return Sharding()
    config = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    stays_whole = str(config.get("reshard_after_forward", True)).lower() == "false"
    offloads = str(config.get("cpu_offload", False)).lower() == "true"
    return Sharding("FSDP", processes, processes, processes, upcasts=mixed, stays_whole=stays_whole, offloads=offloads)


# -- the whole ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A line of the account.

    Attributes:
        name: of the part.
        bytes: of one process.
        words: what explains the number.
    """

    name: str
    bytes: int
    words: str = ""


def account(
    model: nn.Module,
    *,
    optim: str,
    processes: int = 1,
    sharding: Sharding | None = None,
    quantized: str | None = None,
    mixed: torch.dtype | None = None,
    ema: bool = False,
    accumulates: bool = False,
) -> list[Part]:
    """All that one process keeps from step to step, and what it brings together or writes out to compute.

    Args:
        model: on the meta device or a real one, not sharded and not quantized.
        optim: as ``TrainingArguments.optim``.
        processes: number of them.
        sharding: see :func:`choose_sharding`.
        quantized: ``4bit`` or ``8bit``, or None.
        mixed: dtype of autocast, or None.
        ema: the target is encoded with a copy of the trained weights.
        accumulates: a step has several micro-batches.
    """
    sharding = sharding or Sharding()

    def width(tensor: Tensor) -> int:
        if sharding.upcasts and tensor.requires_grad:
            return max(MASTER, tensor.element_size())
        return mixed.itemsize if sharding.halves and mixed is not None else tensor.element_size()

    parts: list[Part] = []

    def add(name: str, size: int, shares: int, words: str = "", *, offloaded: bool = False) -> None:
        told = [words] if words else []
        told += [f"1/{shares}"] if shares > 1 else []
        told += ["in the host's memory"] if offloaded else []
        parts.append(Part(name, 0 if offloaded else math.ceil(size / shares), ", ".join(told)))

    everything = sharding.offloads and sharding.words == "FSDP"
    weights = quantized_bytes(model, quantized, width) if quantized else nbytes(model.parameters(), width)
    bits = sorted({8 * width(parameter) for parameter in model.parameters()})
    words = f"{' and '.join(map(str, bits))} bits"
    words = f"{quantized}, the others {words}" if quantized else words
    add("weights", weights, sharding.weights, words, offloaded=everything)
    if sharding.halves:
        master = sum(MASTER * p.numel() for p in trained(model))
        add("master weights", master, sharding.states, "32 bits", offloaded=sharding.offloads)
    gradients = nbytes(trained(model), width)
    add("gradients", gradients, sharding.gradients, offloaded=everything)
    # DeepSpeed's optimizer works on the master weights.
    states = optimizer_bytes(model, optim, (lambda _: MASTER) if sharding.halves else width)
    if states is None:
        parts.append(Part("optimizer states", 0, f"not known for {optim}, so left out"))
    else:
        add("optimizer states", states, sharding.states, optim, offloaded=sharding.offloads)
    if ema:
        add("averaged weights", gradients, 1, "target_grad ema")
    if processes > 1 and not sharding.words:
        add("buckets of DDP", gradients, 1, "a second copy of the gradients, to be summed up")
    if sharding.weights > 1:
        add("gathered blocks", _gathered(model, sharding, mixed), 1, "whole weights and gradients while in use")
    if accumulates and sharding.words == "FSDP" and processes > 1:
        # Trainer keeps FSDP from scattering them before the last micro-batch.
        whole = nbytes(trained(model), lambda p: mixed.itemsize if mixed is not None else p.element_size())
        add("whole gradients", whole, 1, "between micro-batches, see sync_each_batch of accelerate")
    if quantized:
        largest = max((layer.weight.numel() for layer in quantized_layers(model)), default=0)
        add("largest matrix", largest * (mixed or torch.float32).itemsize, 1, "written out while in use")
    return parts


def _gathered(model: nn.Module, sharding: Sharding, mixed: torch.dtype | None) -> int:
    """Bytes of what is whole at a time: two blocks (the next one is fetched ahead) and what is outside of all blocks,
    and the gradients of one block and of the latter."""

    def size(tensors: Iterable[Tensor], *, gradients: bool = False) -> int:
        unique = {id(t): t for t in tensors if t.requires_grad or not gradients}.values()
        return sum(t.numel() * (mixed.itemsize if mixed is not None else t.element_size()) for t in unique)

    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside]
    largest = max(blocks, key=lambda block: size(block.parameters())) if blocks else nn.Module()
    whole = size(model.parameters()) if sharding.stays_whole else size(outside) + 2 * size(largest.parameters())
    return whole + size(outside, gradients=True) + size(largest.parameters(), gradients=True)
