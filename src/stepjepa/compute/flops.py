"""What a pass costs in FLOPs: derived from the model's modules, and counted by torch while it runs.

Both say the same thing, the multiplications and additions of matrix products (a product of ``[m, k]`` and ``[k, n]`` is
``2 m k n``): projections, attention, LM head, and their backward passes. Attention is counted as a dense kernel runs
it, every query of a row against every key, causal or windowed or not, which is torch's convention too; so are trees
where FlexAttention skips blocks that nobody sees. Sequences concatenated for FlashAttention count each by itself. Not
derived, as the thousandth part that they are: rotary angles, the loss, convolutions and scans of recurrent models; nor
are the modules of a user's own terms, since only they know what goes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stepjepa.batch.collate import Batch
from stepjepa.compute.flop_probe import Cost, derive


class Shape(NamedTuple):
    """What decides the cost of a micro-batch.

    Attributes:
        rows: R, of the largest pass.
        length: T of it, padding included.
        labels: positions that go through the LM head.
        pairs: P.
        squares: pairs of a query and a key that attention multiplies.
        further: tokens of all other passes, padding included.
        passes: number of them.
    """

    rows: int
    length: int
    labels: int
    pairs: int
    squares: int
    further: int = 0
    passes: int = 1

    @classmethod
    def of(cls, batch: Batch) -> Shape:
        """The shape of a micro-batch."""
        shapes = [each["input_ids"].shape for each in batch.passes]
        rows, length = max(shapes, key=lambda shape: shape.numel())
        labels, squares = len(batch["head_index"]), sum(shape.numel() * shape[1] for shape in shapes)
        if len(batch["prompt_row"]):
            # The two losses go through the head one after the other, each with its own positions.
            labels = sum(len(batch[name].unique()) for name in ("label_row", "prompt_row"))
        if "cu_seq_lens" in batch:
            squares = int(batch["cu_seq_lens"].long().diff().square().sum())
        further = sum(shape.numel() for shape in shapes) - rows * length
        return cls(rows, length, labels, batch.pairs, squares, further, len(shapes))

    @property
    def cells(self) -> int:
        """Tokens that are computed, padding included."""
        return self.rows * self.length + self.further


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of a pass as a function of its shape.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass, what gradient checkpointing runs again included.
        token_rows: the share of ``backward.label`` that is due to trained token rows in a head that is otherwise
            frozen (PEFT, tied weights).
        ema: a micro-batch that has pairs also runs a second decoder forward.
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

    def of_shape(self, shape: Shape, *, backward: bool = True) -> int:
        """FLOPs of a micro-batch of this shape, with the backward pass or without."""
        total = _cost(self.forward, shape)
        if backward:
            total += _cost(self.backward, shape)
        if self.ema and shape.pairs:
            total += shape.cells * self.forward.token + shape.squares * self.forward.square
        return total

    def of_batch(self, batch: Batch, *, backward: bool = True) -> int:
        """FLOPs of a micro-batch, with the backward pass or without."""
        return self.of_shape(Shape.of(batch), backward=backward)

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


def _cost(cost: Cost, shape: Shape) -> int:
    products = shape.cells * cost.token + shape.squares * cost.square
    return products + shape.labels * cost.label + shape.pairs * cost.pair + shape.passes * cost.fixed


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
