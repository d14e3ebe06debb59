"""What processes send each other in a step, counted while it runs: collectives and their bytes, by purpose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operator -> kind of collective, and which of its arguments is the whole tensor: what is reduced, or what is gathered.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "barrier": ("barrier", None),
}
# What a collective is for: told by where in the package it is called from, else by its kind.
_CALLERS = {("gathering.py", None): "embeddings", ("trainer.py", "_counts"): "counts"}
_CALLERS |= {("bench_sharded.py", "_counts"): "counts"}
_KINDS = {"all_gather": "weights", "all_reduce": "gradients", "reduce_scatter": "gradients", "broadcast": "buffers"}


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of what runs inside: those of torch.distributed, of DDP and of FSDP2.

    Attributes:
        found: by purpose and kind (``gradients, all_reduce``): ``calls``, and ``bytes`` of the whole tensors: what is
            reduced, or what comes out of gathering, at one process. A ring sends (n - 1) / n of them from each of n
            processes, for an all-reduce twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective, then run it."""
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            kind, whole = _COLLECTIVES.get(name, (name, 0))
            size = 0 if whole is None else sum(tensor.nbytes for tensor in _tensors(args[whole]))
            entry = self.found.setdefault(f"{_purpose(kind)}, {kind}", {"calls": 0, "bytes": 0})
            entry["calls"] += 1
            entry["bytes"] += size
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _purpose(kind: str) -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file, function = frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name
        for key in ((file, None), (file, function)):
            if key in _CALLERS:
                return _CALLERS[key]
        frame = frame.f_back
    return _KINDS.get(kind, "other")
