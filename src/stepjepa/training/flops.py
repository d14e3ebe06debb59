"""FLOPs of a forward and backward pass: a formula fitted to torch's count of a few passes, and torch's live count.

The count has the multiplications and additions of matrix products (``[m, k]`` by ``[k, n]`` is ``2 m k n``):
projections, attention, LM head, and their backward passes. As in torch, attention counts as dense, every query of a row
against every key, even for trees, where FlexAttention skips blocks; by segments, every query of a call against every
key of that call. It leaves out rotary angles and the loss, about a thousandth of the total, and the modules of a
user's own terms, whose inputs are unknown here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer

from stepjepa.batch.micro_batch import Batch
from stepjepa.models.architecture import base_model, find_decoder, find_heads
from stepjepa.models.lm_head import LMHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments


class Recomputation(TypedDict):
    """Which parts are recomputed in the backward pass: arguments of :meth:`FlopModel.of` with these names."""

    gradient_checkpointing: bool
    reentrant: bool


def recomputation(args: TrainingArguments) -> Recomputation:
    """Return whether training checkpoints its layers, by their own option or by that of FSDP, and how."""
    fsdp = args.fsdp_config if args.fsdp and isinstance(args.fsdp_config, dict) else {}
    by_fsdp = str(fsdp.get("activation_checkpointing")).lower() == "true"
    reentrant = bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)) and not by_fsdp
    return {"gradient_checkpointing": bool(args.gradient_checkpointing) or by_fsdp, "reentrant": reentrant}


class Shape(NamedTuple):
    """The counts of a micro-batch that determine its cost."""

    tokens: int  # computed, padding included
    squares: int  # (query, key) pairs of attention
    labels: int  # positions that go through the LM head; those of the prompt loss are counted separately
    pairs: int  # of embeddings
    passes: int = 1

    @classmethod
    def of(cls, batch: Batch) -> Shape:
        """Return the shape of a micro-batch."""
        shapes = [one_pass.input_ids.shape for one_pass in batch.passes]
        # The LM loss and the prompt loss call the head one after the other, each with its own positions.
        labels = len(batch.head_index) + len(batch.prompt_index)
        squares = sum(map(_squares, batch.passes))
        return cls(sum(shape.numel() for shape in shapes), squares, labels, batch.pairs, len(shapes))


def _squares(batch: Batch) -> int:
    """Count the (query, key) pairs of attention in one pass: of all calls by segments, or of whole rows."""
    segments = batch.trees and batch.trees.segments
    if segments:
        return segments.scores
    rows, length = batch.input_ids.shape
    return rows * length * length


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of the forward and backward passes of a micro-batch as a function of its :class:`Shape`."""

    token: int = 0  # per token of the rows, padding included
    square: int = 0  # per (query, key) of a row: attention
    label: int = 0  # per labelled position: the LM head
    pair: int = 0  # per pair: the predictor head
    fixed: int = 0  # per pass: adapted weights of experts, which PEFT recomputes; one state before the LM head
    token_rows: int = 0  # the part of ``label`` that trains token rows of an otherwise frozen head
    ema_token: int = 0  # per token of a micro-batch with pairs: the forward pass of the averaged decoder
    ema_square: int = 0  # per (query, key) of that pass

    @classmethod
    def of(
        cls, model: nn.Module, *, gradient_checkpointing: bool = False, reentrant: bool = False, ema: bool = False
    ) -> FlopModel:
        """Fit the cost to passes of three lengths; a large model's on fake tensors, if its operations allow that.

        Args:
            model: a causal language model or a PEFT wrapper of one, not wrapped by DDP or FSDP; it is not changed.
            gradient_checkpointing: layers are recomputed in the backward pass.
            reentrant: by the variant ``use_reentrant``.
            ema: averaged weights encode the target: one more forward pass of the decoder, without backward pass.
        """
        checkpoint_fn = partial(checkpoint, use_reentrant=reentrant) if gradient_checkpointing else None
        decoder, head, before_head = _fit(model, checkpoint_fn), _head(model), _before_head(model)
        return cls(
            token=decoder.both.token,
            square=decoder.both.square,
            label=head.label + before_head.both,
            pair=_predictor_head(model),
            # In every pass one state goes through the model's own layers before the head, see ``encode``.
            fixed=decoder.both.fixed + before_head.forward,
            token_rows=head.token_rows,
            ema_token=decoder.forward.token if ema else 0,
            ema_square=decoder.forward.square if ema else 0,
        )

    def of_shape(self, shape: Shape) -> int:
        """Return the FLOPs of a micro-batch of this shape, forward and backward."""
        total = shape.tokens * self.token + shape.squares * self.square + shape.passes * self.fixed
        total += shape.labels * self.label + shape.pairs * self.pair
        return total + bool(shape.pairs) * (shape.tokens * self.ema_token + shape.squares * self.ema_square)

    def of_batch(self, batch: Batch) -> int:
        """Return the FLOPs of a micro-batch, forward and backward, padding included."""
        return self.of_shape(Shape.of(batch))

    def regular(self, *, trains_rows: bool = False) -> FlopModel:
        """Return the cost of regular training; ``trains_rows`` if that trains token rows, too, as with ``plain``."""
        rows = 0 if trains_rows else self.token_rows
        head = {"label": self.label - rows, "token_rows": self.token_rows - rows}
        return replace(self, pair=0, ema_token=0, ema_square=0, **head)


# Number of positions at which the layers before the LM head are counted.
_POSITIONS = 2
# Most weights of a model for which a pass of a few tokens takes less time than one on fake tensors.
_SMALL = 4 * 10**7


class _Passes(NamedTuple):
    """FLOPs of the forward pass, and of forward and backward pass together."""

    forward: int
    both: int


class _Polynomial(NamedTuple):
    """FLOPs of the decoder on one row of T tokens: ``token * T + square * T**2 + fixed``."""

    token: int
    square: int
    fixed: int


class _DecoderFlops(NamedTuple):
    """The cost of the forward pass of the decoder, and of forward and backward pass together."""

    forward: _Polynomial
    both: _Polynomial


class _HeadFlops(NamedTuple):
    """The cost of the LM head for each position."""

    label: int
    token_rows: int  # the part of it that trains a few rows only


def _fit(model: nn.Module, checkpoint_fn: Callable[..., Tensor] | None) -> _DecoderFlops:
    """Fit the FLOPs of the decoder to the counts of three lengths, which is exact, since they are such a polynomial."""
    config: Any = find_decoder(model).config
    positions = getattr(config, "max_position_embeddings", None) or 10**6
    lengths = [times * min(_unit(config), positions // 5) for times in (1, 2, 5)]
    terms = np.array([[length, length**2, 1] for length in lengths], float)

    def fit(copied: nn.Module) -> _DecoderFlops:
        _set_to_train(copied, checkpoint_fn)
        counted = np.array([_count_layers(copied, length) for length in lengths], float)  # [3, 2]
        forward, both = np.linalg.solve(terms, counted).round().astype(int).T.tolist()
        return _DecoderFlops(_Polynomial(*forward), _Polynomial(*both))

    parameters = list(model.parameters())
    device, small = parameters[0].device.type, sum(parameter.numel() for parameter in parameters) < _SMALL
    with torch.random.fork_rng(), torch.enable_grad():
        if small and device in ("cpu", "meta"):
            return fit(_copied(model, _shared if device == "cpu" else _zeros))
        try:
            with _without_values(model) as empty:
                return fit(empty)
        except (RuntimeError, NotImplementedError, AssertionError):
            # In models with experts, shapes depend on values.
            return fit(_copied(model, _shared))


def _unit(config: PreTrainedConfig) -> int:
    """Return the chunk size of recurrent layers, which pad sequences to a multiple of it; 4 without such layers."""
    chunks = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size"))
    linear = any("linear" in str(kind) for kind in getattr(config, "layer_types", None) or ())
    return next((int(chunk) for chunk in chunks if chunk), 64 if linear else 4)


def _set_to_train(model: PreTrainedModel, checkpoint_fn: Callable[..., Tensor] | None) -> None:
    """Set a copy of a model to training, its blocks checkpointed by ``checkpoint_fn`` unless that is None."""
    model.train()
    # Torch does not count the FLOPs of FlashAttention and of kernels for quantized weights.
    config = base_model(model).config
    if "flash" in str(config._attn_implementation):
        config._attn_implementation = "sdpa"
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            module.forward = partial(_unpacked, module)  # type: ignore[method-assign]
        # Not by the model's own method, which also adds hooks to the embeddings for adapters.
        if (
            isinstance(module, GradientCheckpointingLayer)
            and checkpoint_fn is not None
            and not module.gradient_checkpointing
        ):
            module.gradient_checkpointing, module._gradient_checkpointing_func = True, checkpoint_fn


def _unpacked(layer: nn.Linear, values: Tensor) -> Tensor:
    """Compute a dense product of the size of a quantized layer's product."""
    return F.linear(values, values.new_zeros(layer.out_features, layer.in_features))


# If all layers are alike, models of 2 and of 3 layers are counted: two, since the first layer's input may need no
# gradient.
_FEW = (2, 3)


def _count_layers(model: PreTrainedModel, length: int) -> _Passes:
    """Count as :func:`_count` does; if all layers are alike, extrapolate from models of two and three layers."""
    decoder = find_decoder(model)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) <= sum(_FEW) or not _alike(decoder, layers):
        return _count(model, length)
    config = decoder.config
    few: list[_Passes] = []
    try:
        for number in _FEW:
            decoder.layers, config.num_hidden_layers = nn.ModuleList(layers[:number]), number
            few.append(_count(model, length))
    finally:
        decoder.layers, config.num_hidden_layers = layers, len(layers)
    more = len(layers) - _FEW[0]
    return _Passes(*(fewer + more * (one_more - fewer) for fewer, one_more in zip(*few, strict=True)))


def _alike(decoder: PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Return whether all layers have the same type, and modules of the same types and sizes, trained alike."""
    parts = [
        (
            [(name, type(module)) for name, module in layer.named_modules()],
            [(name, parameter.shape, parameter.requires_grad) for name, parameter in layer.named_parameters()],
        )
        for layer in layers
    ]
    kinds = getattr(decoder.config, "layer_types", None) or ()
    return all(part == parts[0] for part in parts) and len({*kinds}) <= 1


def _count(model: nn.Module, length: int) -> _Passes:
    """Count the FLOPs of the decoder on one row of ``length`` tokens."""
    ids = torch.zeros((1, length), dtype=torch.long, device=next(model.parameters()).device)
    with counting() as counter:
        states = find_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
        forward = counter.get_total_flops()
        if states.requires_grad:
            states.sum().backward()
    return _Passes(forward, counter.get_total_flops())


def _head(model: PreTrainedModel) -> _HeadFlops:
    """Return the FLOPs of the LM head per position, forward and backward."""
    head = model.get_output_embeddings()
    vocabulary, width = model.get_input_embeddings().weight.shape
    flops = 2 * vocabulary * width
    trained = [weight for weight in (head or nn.Module()).parameters() if weight.requires_grad and weight.ndim > 1]
    below = any(parameter.requires_grad for parameter in find_decoder(model).parameters())
    if trained and all(weight.numel() < vocabulary * width for weight in trained):
        # Rows that an adapter trains have a separate product, in addition to that of the frozen weight.
        rows = sum(2 * weight.numel() for weight in trained) * (2 + below)
        # Of an untied head they are rows of labels, which regular training trains, too.
        untied = getattr(getattr(head, "token_adapter", None), "tied_adapter", None) is None
        return _HeadFlops(flops * (1 + below) + rows, 0 if untied else rows)
    return _HeadFlops(flops * (1 + below + bool(trained)), 0)


def _before_head(model: nn.Module) -> _Passes:
    """Return the FLOPs per position of layers between decoder and LM head (BERT, ModernBERT).

    0 on the meta device, where :class:`LMHead` can't see whether there are any.
    """
    head = LMHead(model)
    if not head.around.before:
        return _Passes(0, 0)
    decoder = find_decoder(model)
    weight = next(decoder.parameters())
    below = any(parameter.requires_grad for parameter in decoder.parameters())
    shape = _POSITIONS, decoder.config.hidden_size
    states = torch.zeros(shape, dtype=weight.dtype, device=weight.device, requires_grad=below)
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    with torch.random.fork_rng(), torch.enable_grad(), counting() as counter:
        inputs = head.inputs(states)
        forward = counter.get_total_flops()
        if inputs.requires_grad:
            # Not backward(), which would leave gradients in the model.
            torch.autograd.grad(inputs.sum(), [*trained, *[states] * below], allow_unused=True)
    return _Passes(forward // _POSITIONS, counter.get_total_flops() // _POSITIONS)


def _predictor_head(model: nn.Module) -> int:
    """Return the FLOPs of the predictor head's linear layers per source embedding."""
    heads = find_heads(model)
    if heads is None or "predictor_head" not in heads:
        return 0
    layers = [layer for layer in heads["predictor_head"].modules() if isinstance(layer, nn.Linear)]
    # The forward pass, the gradient of the input embedding, and the gradient of a trained weight.
    return sum(2 * layer.in_features * layer.out_features * (2 + layer.weight.requires_grad) for layer in layers)


# -- torch's counter ---------------------------------------------------------------------------------------------------


def _attention_forward(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    batch, heads, queries, size = query
    return 2 * batch * heads * queries * key[-2] * (size + value[-1])


def _attention_backward(
    _gradient: object, query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    batch, heads, queries, size = query
    # Recomputed scores, gradients of query and key (``size`` each); gradients of probabilities and value.
    return 2 * batch * heads * queries * key[-2] * (3 * size + 2 * value[-1])


def _varlen_forward(query: Tensor, _key: Tensor, value: Tensor, *bounds: Any, **__: object) -> int:
    return _varlen_products(query, *bounds[:2]) * (query.shape[-1] + value.shape[-1])


def _varlen_backward(_gradient: Tensor, query: Tensor, _key: Tensor, value: Tensor, *more: Any, **__: object) -> int:
    # Behind the output and the state of the softmax.
    return _varlen_products(query, *more[2:4]) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _varlen_products(query: Tensor, query_bounds: Tensor, key_bounds: Tensor) -> int:
    """Return twice the (query, key) pairs of all heads and segments: queries ``[T, H, d]``, bounds ``[S + 1]``."""
    return 2 * query.shape[1] * int((query_bounds.diff().long() * key_bounds.diff().long()).sum())


# The formulas of a variable-length call are passed its arguments, not their shapes alone.
_varlen_forward._get_raw = _varlen_backward._get_raw = True  # type: ignore[attr-defined]  # as torch marks its own


def _grouped_product(first: Sequence[int], second: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of products of experts with their rows, or of the weights' gradients, sums over rows."""
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * groups * first[-2] * first[-1] * second[-1]


# Operation -> function from the shapes of its arguments to FLOPs, for operations that torch's registry lacks (the CPU's
# fused attention, products of experts) or that older versions refuse (fewer key heads than query heads).
_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _grouped_product,
    torch.ops.aten._flash_attention_forward: _varlen_forward,
    torch.ops.aten._flash_attention_backward: _varlen_backward,
}
for _kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    _FORMULAS[getattr(torch.ops.aten, f"_scaled_dot_product_{_kind}")] = _attention_forward
    _FORMULAS[getattr(torch.ops.aten, f"_scaled_dot_product_{_kind}_backward")] = _attention_backward


def counting() -> FlopCounterMode:
    """Make a context that counts the FLOPs inside by torch's counter (``get_total_flops()``).

    Kernels from outside torch (flash-attn) are not counted. Torch decomposes composite operations to count them, so
    results may differ in rounding.
    """
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


# -- shapes without values: an 8B model runs in seconds and takes no memory --------------------------------------------


def _shared(tensor: Tensor) -> Tensor:
    """Return a weight without its gradient, or a copy of a buffer, which a layer may change in training."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _zeros(tensor: Tensor) -> Tensor:
    """Return zeros on the CPU in place of a tensor without values."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _copied(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a model, replacing its parameters and buffers by ``change`` of them; tied parameters stay tied."""
    memo: dict[int, Tensor] = {
        id(p): nn.Parameter(change(p), requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo | {id(buffer): change(buffer) for buffer in model.buffers()})


@contextmanager
def _without_values(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of a model with fake tensors, to be run inside the block; the model may be on any device.

    Torch chooses the kernels of the CPU and runs none of them.
    """
    # Torch would log a traceback as well.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield _copied(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    finally:
        log.disabled = quiet
