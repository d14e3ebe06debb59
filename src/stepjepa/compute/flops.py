"""What a pass costs in FLOPs: derived from the model's modules, and counted by torch while it runs.

Both say the same thing, the multiplications and additions of matrix products (a product of ``[m, k]`` and ``[k, n]`` is
``2 m k n``): projections, attention, head, and their backward passes. Attention is counted as a kernel without a mask
runs it, every query against every key, causal or windowed or not, which is torch's convention too. What
``models/pieces.py`` leaves out on long rows of a CPU is derived all the same, so that cost is no matter of the device;
torch counts less there. Left out of the derivation, as the thousandth part that they are: rotary angles, the loss,
convolutions and scans of recurrent models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stepjepa.compute.flop_probe import Cost, derive

Number = TypeVar("Number", int, NDArray[np.float64])


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of a pass as a function of its shape.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass, what gradient checkpointing runs again included.
        token_rows: the share of ``backward.label`` that is due to trained token rows in a head that is otherwise
            frozen (PEFT, tied weights).
        ema: the passes of a micro-batch that has pairs also run a second decoder forward.
        exact: False if the number of active experts is unknown and all of them were counted.
    """

    forward: Cost
    backward: Cost
    token_rows: int = 0
    ema: bool = False
    exact: bool = True

    @classmethod
    def of(
        cls, model: nn.Module, *, gradient_checkpointing: bool = False, reentrant: bool = False, ema: bool = False
    ) -> FlopModel:
        """Derive the cost from a model as it will be trained.

        The model runs a row of two tokens once, in evaluation mode and with nothing kept, to see which modules are
        called, in which order, and how far down gradients are needed (frozen weights, adapters).

        Args:
            model: a causal language model or a PEFT wrapper of one, its attention implementation already chosen; not
                wrapped by DDP or FSDP.
            gradient_checkpointing: the blocks' forward is run again in the backward pass.
            reentrant: by the older kind of checkpointing, which runs all of it again; the newer stops at the last
                tensor that is needed.
            ema: the target comes from a copy of the decoder: one more forward without head and backward.
        """
        costs = derive(model, gradient_checkpointing=gradient_checkpointing, reentrant=reentrant)
        return cls(costs.forward, costs.backward, costs.token_rows, ema, costs.exact)

    def of_pass(
        self,
        rows: Number,
        length: Number,
        labels: Number,
        pairs: Number | int = 0,
        *,
        views: Number | int = 1,
        backward: bool = True,
    ) -> Number:
        """FLOPs of one pass, or of many at once.

        Args:
            rows: R.
            length: T, padding included.
            labels: positions at which logits are computed.
            pairs: pairs whose source goes through a predictor head.
            views: 1 if its micro-batch has pairs, else 0; counts with ``ema`` alone.
            backward: with the backward pass.
        """
        cells = rows * length
        squares = cells * length
        total = _cost(self.forward, cells, squares, labels, pairs)
        if backward:
            total = total + _cost(self.backward, cells, squares, labels, pairs)
        if self.ema:
            total = total + (cells * self.forward.token + squares * self.forward.square) * views
        return total

    def of_batch(self, groups: Sequence[dict[str, Tensor]], *, backward: bool = True) -> int:
        """FLOPs of the groups of a batch, see ``grouping.GroupCollator``."""
        total = 0
        views = int(any(group["source_index"].numel() for group in groups))
        for group in groups:
            rows, length = group["input_ids"].shape
            labels, pairs = group["label_index"].numel(), group["source_index"].numel()
            total += self.of_pass(rows, length, labels, pairs, views=views, backward=backward)
        return total

    def regular(self, *, trains_rows: bool = False) -> FlopModel:
        """The same model as regular training runs it: no predictor head, no second decoder, no predictor rows.

        Args:
            trains_rows: regular training has token rows of its own to train, as those of the form without a chat.
        """
        rows = 0 if trains_rows else self.token_rows
        return replace(
            self,
            forward=replace(self.forward, pair=0),
            backward=replace(self.backward, pair=0, label=self.backward.label - rows),
            token_rows=self.token_rows - rows,
            ema=False,
        )


def _cost(cost: Cost, cells: Number, squares: Number, labels: Number, pairs: Number | int) -> Number:
    return cells * cost.token + squares * cost.square + labels * cost.label + pairs * cost.pair + cost.fixed


def _attention_forward(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, queries, size = query
    return 2 * batch * heads * queries * key[-2] * (size + value[-1])


def _attention_backward(
    _gradient: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    batch, heads, queries, size = query
    # The scores again; gradients of query and key; of probabilities and value.
    return 2 * batch * heads * queries * key[-2] * (3 * size + 2 * value[-1])


def _grouped_product(first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """Rows dealt out to experts, or, for the weights' gradient, their sum over rows dealt out to experts."""
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * groups * first[-2] * first[-1] * second[-1]


_ATEN = torch.ops.aten
FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._scaled_dot_product_flash_attention: _attention_forward,
    _ATEN._scaled_dot_product_flash_attention_backward: _attention_backward,
    _ATEN._scaled_dot_product_efficient_attention: _attention_forward,
    _ATEN._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _ATEN._scaled_dot_product_cudnn_attention: _attention_forward,
    _ATEN._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    _ATEN._grouped_mm: _grouped_product,
}
"""Operation -> its FLOPs from the shapes of its arguments: what torch's registry lacks (the CPU's fused attention,
products of experts), and what older versions refuse (fewer key heads than query heads)."""


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count what runs inside the block, forward and backward, by torch's counter.

    The context's value has the count in ``get_total_flops()``. Kernels from outside torch (flash-attn) are not seen.
    Torch takes composite operations apart to count them, so that results may differ in rounding.
    """
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        yield counter


def measure(function: Callable[[], Any]) -> int:
    """Run something once and return its FLOPs by torch's counter."""
    with counting() as counter:
        function()
    return int(counter.get_total_flops())
