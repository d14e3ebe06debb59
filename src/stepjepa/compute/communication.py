"""Bytes that a process sends in a step, from what is sharded.

A ring moves (n - 1) / n of a tensor through each of n processes to gather it, the same to reduce and scatter it, and
twice that to reduce it whole; what a process sends is what it receives. Trees and switches that add up on the way send
less, and no collective can send much less than half of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepjepa.compute.memory import Sharding, nbytes, trained


@dataclass(frozen=True)
class Transfer:
    """Something that all processes take part in.

    Attributes:
        name: what is sent, and how.
        bytes: that one process sends in an optimizer step.
        words: how it comes about.
    """

    name: str
    bytes: int
    words: str


def transfers(
    model: nn.Module,
    sharding: Sharding,
    *,
    processes: int,
    micro_batches: int,
    synced: bool = False,
    mixed: torch.dtype | None = None,
    gathered: int = 0,
) -> list[Transfer]:
    """What an optimizer step sends.

    Args:
        model: on the meta device or a real one, not sharded.
        sharding: see ``memory.choose_sharding``.
        processes: n.
        micro_batches: of a process in a step.
        synced: gradients are sent after each of them, where otherwise the last one of a step sends their sum.
        mixed: dtype of autocast, or None; FSDP and DeepSpeed send weights and gradients in it.
        gathered: bytes of the embeddings of one process that each of the others is sent in a step.
    """
    if processes == 1:
        return []
    share = (processes - 1) / processes

    def width(tensor: Tensor) -> int:
        return mixed.itemsize if mixed is not None else tensor.element_size()

    found: list[Transfer] = []

    def add(name: str, size: float, times: float, words: str) -> None:
        found.append(Transfer(name, round(size * times * share), words))

    weights, gradients = nbytes(model.parameters(), width), nbytes(trained(model), width)
    # FSDP is made to wait for the last micro-batch, and so are DDP and the first stages of DeepSpeed.
    waits = not synced and not (sharding.words.startswith("DeepSpeed") and sharding.gradients > 1)
    scattered = 1 if waits else micro_batches
    if sharding.states == 1:
        # DDP keeps the dtype of the weights, whatever autocast computes in.
        size = gradients if sharding.words else nbytes(trained(model))
        add("gradients, summed up", size, 2 * scattered, f"{sharding.words or 'DDP'}, {_times(scattered)} a step")
    else:
        add("gradients, scattered", gradients, scattered, f"{sharding.words}, {_times(scattered)} a step")
    if sharding.weights > 1:
        gathers = micro_batches * (1 if sharding.stays_whole else 2)
        passes = "forward pass" if sharding.stays_whole else "forward and backward pass"
        add("weights, gathered", weights, gathers, f"{sharding.words}, for each {passes}")
    elif sharding.states > 1:
        add("weights, gathered", nbytes(trained(model), width), 1, f"{sharding.words}, the updated shares")
    if gathered:
        # To every other process, and the gradients of all rows are summed up whole.
        add("embeddings of pairs", gathered * processes, 3, "gathered, and their gradients summed up")
    return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def total(found: Iterable[Transfer]) -> int:
    """Bytes of all of them."""
    return sum(one.bytes for one in found)
