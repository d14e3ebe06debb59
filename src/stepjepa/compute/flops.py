"""What a pass costs in FLOPs: fitted to torch's own count of a few passes, and counted by torch while it runs.

Counted are the multiplications and additions of matrix products (``[m, k]`` by ``[k, n]`` is ``2 m k n``): projections,
attention, LM head, and their backward passes. Attention is counted as a dense kernel runs it, every query of a row
against every key, which is torch's convention too; so are trees where FlexAttention skips blocks. Sequences that are
concatenated for FlashAttention count each by itself. Not counted, as the thousandth part that they are: rotary angles,
the loss, and the modules of a user's own terms, since only they know what goes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer

from stepjepa.batch.collate import Batch
from stepjepa.compute.shapes import copied, without_values
from stepjepa.models.architecture import base_model, find_decoder
from stepjepa.models.heads import find_heads

SMALL = 5 * 10**7
"""Parameters below which a pass costs less than one on shapes."""


class Shape(NamedTuple):
    """What decides the cost of a micro-batch.

    Attributes:
        tokens: that are computed, padding included.
        squares: pairs of a query and a key that attention multiplies.
        labels: positions that go through the LM head.
        pairs: P.
        passes: that the micro-batch is run in.
    """

    tokens: int
    squares: int
    labels: int
    pairs: int
    passes: int = 1

    @classmethod
    def of(cls, batch: Batch) -> Shape:
        """The shape of a micro-batch."""
        shapes = [each["input_ids"].shape for each in batch.passes]
        labels, squares = len(batch["head_index"]), sum(shape.numel() * shape[1] for shape in shapes)
        if len(batch["prompt_row"]):
            # The two losses go through the head one after the other, each with its own positions.
            labels = sum(len(batch[name].unique()) for name in ("label_row", "prompt_row"))
        if "cu_seq_lens" in batch:
            squares = int(batch["cu_seq_lens"].long().diff().square().sum())
        return cls(sum(shape.numel() for shape in shapes), squares, labels, batch.pairs, len(shapes))


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of a forward and backward pass as a function of its shape.

    Attributes:
        token: for each token of the rows, padding included.
        square: for each (query, key) of a row: attention.
        label: for each labelled position: the head.
        pair: for each pair: the predictor head.
        fixed: for each pass: PEFT builds the adapted weights of experts anew in every pass.
        token_rows: the share of ``label`` that is due to trained token rows in a head that is otherwise frozen (PEFT,
            tied weights).
        ema_token: for each token of a micro-batch with pairs: the forward pass of the averaged decoder.
        ema_square: for each (query, key) of it.
    """

    token: int = 0
    square: int = 0
    label: int = 0
    pair: int = 0
    fixed: int = 0
    token_rows: int = 0
    ema_token: int = 0
    ema_square: int = 0

    @classmethod
    def of(
        cls, model: nn.Module, *, gradient_checkpointing: bool = False, reentrant: bool = False, ema: bool = False
    ) -> FlopModel:
        """Fit the cost to passes of three lengths; those of a large model are run on shapes alone where it allows that.

        Args:
            model: a causal language model or a PEFT wrapper of one, its attention implementation already chosen; not
                wrapped by DDP or FSDP. It is left as it is.
            gradient_checkpointing: the blocks' forward is run again in the backward pass.
            reentrant: by the older kind of checkpointing.
            ema: the target comes from a copy of the decoder: one more forward without head and backward.
        """
        again = partial(checkpoint, use_reentrant=reentrant) if gradient_checkpointing else None
        forward, both = _fit(model, again)
        label, token_rows = _head(model)
        token, square, fixed = both
        averaged = forward[:2] if ema else (0, 0)
        return cls(token, square, label, _predictor_head(model), fixed, token_rows, *averaged)

    def of_shape(self, shape: Shape) -> int:
        """FLOPs of a micro-batch of this shape."""
        total = shape.tokens * self.token + shape.squares * self.square + shape.passes * self.fixed
        total += shape.labels * self.label + shape.pairs * self.pair
        return total + bool(shape.pairs) * (shape.tokens * self.ema_token + shape.squares * self.ema_square)

    def of_batch(self, batch: Batch) -> int:
        """FLOPs of a micro-batch."""
        return self.of_shape(Shape.of(batch))

    def regular(self, *, trains_rows: bool = False) -> FlopModel:
        """The same model as regular training runs it: no predictor head, no second decoder, no predictor rows.

        Args:
            trains_rows: regular training has token rows of its own to train, as those of the form without a chat.
        """
        rows = 0 if trains_rows else self.token_rows
        kept = {"label": self.label - rows, "token_rows": self.token_rows - rows}
        return replace(self, pair=0, ema_token=0, ema_square=0, **kept)


def _fit(model: nn.Module, again: Callable[..., Any] | None) -> list[list[int]]:
    """FLOPs of the decoder for each token, each (query, key), and each pass: exact, since they are that polynomial.

    Returns:
        The three of the forward pass, and of the forward and backward pass.
    """
    config: Any = find_decoder(model).config
    positions = getattr(config, "max_position_embeddings", None) or 10**6
    lengths = [times * min(_unit(config), positions // 5) for times in (1, 2, 5)]
    terms = np.array([[length, length**2, 1] for length in lengths], float)

    def fit(model: nn.Module) -> list[list[int]]:
        _set_to_train(model, again)
        counted = np.stack([_count(model, length) for length in lengths]).astype(float)  # [3, 2]
        fitted: list[list[int]] = np.linalg.solve(terms, counted).round().astype(int).T.tolist()
        return fitted

    large = sum(parameter.numel() for parameter in model.parameters()) >= SMALL
    with torch.random.fork_rng(), torch.enable_grad():
        if large or next(model.parameters()).is_meta:
            try:
                with without_values(model) as empty:
                    return fit(empty)
            except (RuntimeError, NotImplementedError, AssertionError):
                pass  # Experts, whose shapes depend on values.
        # It shares the values of the model, and has gradients of its own.
        return fit(copied(model, torch.Tensor.detach))


def _unit(config: Any) -> int:
    """Tokens that recurrent layers compute at once, padded to as many; a few where there are none."""
    chunks = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size"))
    linear = any("linear" in str(kind) for kind in getattr(config, "layer_types", None) or ())
    return next((int(chunk) for chunk in chunks if chunk), 64 if linear else 4)


def _set_to_train(model: Any, again: Callable[..., Any] | None) -> None:
    """Put a copy of a model into the state of training, its blocks checkpointed by ``again`` if that is given."""
    model.train()
    # Torch does not see what FlashAttention computes, nor the kernels of quantized weights.
    config = base_model(model).config
    if "flash" in str(config._attn_implementation):
        config._attn_implementation_internal = "sdpa"
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            module.forward = partial(_unpacked, module)  # type: ignore[method-assign]
        # Not by the model's own method, which also hooks into the embeddings of adapters.
        if isinstance(module, GradientCheckpointingLayer) and again is not None and not module.gradient_checkpointing:
            module.gradient_checkpointing, module._gradient_checkpointing_func = True, again


def _unpacked(layer: nn.Linear, values: Tensor) -> Tensor:
    """A product of the size of a quantized layer's."""
    return F.linear(values, values.new_zeros(layer.out_features, layer.in_features))


def _count(model: nn.Module, length: int) -> np.ndarray:
    """FLOPs of the decoder on one row: of forward, and of forward and backward, ``[2]``."""
    decoder = find_decoder(model)
    name, layers = _equal_layers(decoder)
    if name is None:
        return _count_whole(model, length)
    # The first layer may need no gradient of what goes in, so it is counted alone and before another one.
    setattr(decoder, name, layers[:1])
    first = _count_whole(model, length)
    setattr(decoder, name, layers[:2])
    both = _count_whole(model, length)
    setattr(decoder, name, layers)
    return first + (len(layers) - 1) * (both - first)


def _equal_layers(decoder: nn.Module) -> tuple[str | None, Any]:
    """The list of a decoder's layers and its name; the name is None unless there are several, and all cost the same."""
    config: Any = decoder.config
    for name, layers in decoder.named_children():
        if isinstance(layers, nn.ModuleList) and 2 < len(layers) == getattr(config, "num_hidden_layers", None):
            kinds = {
                (type(layer), *((key, each.shape, each.requires_grad) for key, each in layer.named_parameters()))
                for layer in layers
            }
            if len(kinds) == 1 and len({*(getattr(config, "layer_types", None) or ())}) < 2:
                return name, layers
    return None, None


def _count_whole(model: nn.Module, length: int) -> np.ndarray:
    ids = torch.zeros((1, length), dtype=torch.long, device=next(model.parameters()).device)
    with counting() as counter:
        states = find_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
        forward = counter.get_total_flops()
        if states.requires_grad:
            states.sum().backward()
    return np.array([forward, counter.get_total_flops()], dtype=np.int64)


def _head(model: Any) -> tuple[int, int]:
    """FLOPs of a position in the LM head, and those of them that train a few rows alone."""
    head = model.get_output_embeddings()
    vocabulary, width = model.get_input_embeddings().weight.shape
    flops = 2 * vocabulary * width
    trained = [each for each in (head or nn.Module()).parameters() if each.requires_grad and each.ndim > 1]
    # PEFT writes trained rows into a copy of the weight, and autograd takes the gradient of all of it.
    rows_only = bool(trained) and all(each.numel() < vocabulary * width for each in trained)
    below = any(parameter.requires_grad for parameter in find_decoder(model).parameters())
    return flops * (1 + below + bool(trained)), flops if rows_only else 0


def _predictor_head(model: nn.Module) -> int:
    """FLOPs of a source embedding in the linear layers of the predictor head."""
    heads = find_heads(model)
    if heads is None or "predictor_head" not in heads:
        return 0
    layers = [layer for layer in heads["predictor_head"].modules() if isinstance(layer, nn.Linear)]
    # Forward, the gradient of the embedding that goes in, and that of the weight.
    return sum(2 * layer.in_features * layer.out_features * (2 + layer.weight.requires_grad) for layer in layers)


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


def _formulas() -> Iterator[tuple[Any, Callable[..., int]]]:
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        yield getattr(torch.ops.aten, f"_scaled_dot_product_{kind}"), _attention_forward
        yield getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_backward"), _attention_backward
    yield torch.ops.aten._grouped_mm, _grouped_product


FORMULAS = dict(_formulas())
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
