"""What a pass asks of a device, counted as it runs: products, fused attention, bytes moved by all else, operations.

Works for tensors that have shapes alone, as ``live_memory`` does. FLOPs alone say little of the time of a small model,
which goes into moving values and starting operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

from stepjepa.compute.flops import FORMULAS

_ATEN = torch.ops.aten
# They read the rows that are named, not the whole table.
_LOOKUPS = {_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather}
# Nothing is read or written.
_FREE = {_ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.empty_strided, _ATEN.detach}


@dataclass(frozen=True)
class Work:
    """Sums over the operations of one or more passes.

    Attributes:
        products: FLOPs of matrix products.
        attention: FLOPs of attention in one kernel.
        moved: bytes read and written by all other operations.
        calls: number of operations.
    """

    products: float = 0
    attention: float = 0
    moved: float = 0
    calls: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


class WorkCounter(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        work: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._products = self._attention = self._moved = self._calls = 0

    @property
    def work(self) -> Work:
        """So far."""
        return Work(self._products, self._attention, self._moved, self._calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        # Tensors of shapes alone are asked for their device, too (prim).
        if packet in _FREE or func.is_view or func.namespace == "prim":
            return result
        self._calls += 1
        formula = _FORMULAS.get(packet)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=result))
            if "attention" in str(packet):
                self._attention += flops
            else:
                self._products += flops
        else:
            written = sum(map(_bytes, tree_leaves(result)))
            read = written if packet in _LOOKUPS else sum(map(_bytes, tree_leaves((args, kwargs))))
            self._moved += read + written
        return result


def _bytes(value: Any) -> int:
    # What is expanded lies in memory once.
    if not isinstance(value, Tensor):
        return 0
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


_FORMULAS = {**flop_registry, **{packet: shape_wrapper(formula) for packet, formula in FORMULAS.items()}}
