"""FLOPs of the parts of a model, as torch counts them in a few passes: decoder, LM head, predictor head."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepjepa.models.architecture import base_model, find_decoder, find_heads
from stepjepa.models.lm_head import LMHead
from stepjepa.models.without_values import copied, shared, without_values, zeros
from stepjepa.training.flop_counter import counting
from stepjepa.training.recomputation import Recomputation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Number of positions at which the layers before the LM head are counted.
_POSITIONS = 2
# Most weights of a model for which a pass of a few tokens takes less time than one on fake tensors.
_SMALL = 4 * 10**7


class Passes(NamedTuple):
    """FLOPs of the forward pass, and of forward and backward pass together."""

    forward: int
    both: int


class Polynomial(NamedTuple):
    """FLOPs of the decoder on one row of T tokens: ``token * T + square * T**2 + fixed``."""

    token: int
    square: int
    fixed: int


class DecoderFlops(NamedTuple):
    """The cost of the forward pass of the decoder, and of forward and backward pass together."""

    forward: Polynomial
    both: Polynomial


class HeadFlops(NamedTuple):
    """The cost of the LM head for each position."""

    label: int
    token_rows: int  # the part of it that trains a few rows only


def fit_decoder(model: nn.Module, recomputed: Recomputation | None) -> DecoderFlops:
    """Fit the FLOPs of the decoder to the counts of three lengths, which is exact, since they are such a polynomial.

    Blocks of a copy of the model are checkpointed as ``recomputed`` says; None leaves them as they are.
    """
    config: Any = find_decoder(model).config
    positions = getattr(config, "max_position_embeddings", None) or 10**6
    lengths = [times * min(_unit(config), positions // 5) for times in (1, 2, 5)]
    terms = np.array([[length, length**2, 1] for length in lengths], float)

    def fit(copied: nn.Module) -> DecoderFlops:
        _set_to_train(copied, recomputed)
        counted = np.array([_count_layers(copied, length) for length in lengths], float)  # [3, 2]
        forward, both = np.linalg.solve(terms, counted).round().astype(int).T.tolist()
        return DecoderFlops(Polynomial(*forward), Polynomial(*both))

    parameters = list(model.parameters())
    device, small = parameters[0].device.type, sum(parameter.numel() for parameter in parameters) < _SMALL
    with torch.random.fork_rng(), torch.enable_grad():
        if small and device in ("cpu", "meta"):
            return fit(copied(model, shared if device == "cpu" else zeros))
        try:
            with without_values(model) as empty:
                return fit(empty)
        except (RuntimeError, NotImplementedError, AssertionError):
            # In models with experts, shapes depend on values.
            return fit(copied(model, shared))


def _unit(config: PreTrainedConfig) -> int:
    """Return the chunk size of recurrent layers, which pad sequences to a multiple of it; 4 without such layers."""
    chunks = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size"))
    linear = any("linear" in str(kind) for kind in getattr(config, "layer_types", None) or ())
    return next((int(chunk) for chunk in chunks if chunk), 64 if linear else 4)


def _set_to_train(model: PreTrainedModel, recomputed: Recomputation | None) -> None:
    """Set a copy of a model to training, some of its blocks checkpointed unless ``recomputed`` is None."""
    model.train()
    # Torch does not count the FLOPs of FlashAttention and of kernels for quantized weights.
    config = base_model(model).config
    if "flash" in str(config._attn_implementation):
        config._attn_implementation = "sdpa"
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            module.forward = partial(_unpacked, module)  # type: ignore[method-assign]
    if recomputed is not None:
        recomputed.apply(model)


def _unpacked(layer: nn.Linear, values: Tensor) -> Tensor:
    """Compute a dense product of the size of a quantized layer's product."""
    return F.linear(values, values.new_zeros(layer.out_features, layer.in_features))


# Fewest layers of a model from which others are extrapolated: two, since the first layer's input may need no gradient.
_FEWEST = 2


def _few(layers: nn.ModuleList) -> tuple[int, int]:
    """Return two numbers of layers, from which the cost of all is extrapolated: they differ by one period.

    A period is as many layers as have each kind of them once: those whose pass is repeated in the backward pass, and
    those that keep their values. What the smaller number lacks are whole periods.
    """
    checkpointed = [bool(getattr(layer, "gradient_checkpointing", False)) for layer in layers]
    size = len(layers)
    period = next(number for number in range(1, size + 1) if checkpointed[number:] == checkpointed[: size - number])
    fewer = _FEWEST + (size - _FEWEST) % period
    return fewer, fewer + period


def _count_layers(model: PreTrainedModel, length: int) -> Passes:
    """Count as :func:`_count` does; if all layers are alike, extrapolate from models of a few layers."""
    decoder = find_decoder(model)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) <= sum(_few(layers)) or not _alike(decoder, layers):
        return _count(model, length)
    config = decoder.config
    fewest, number_more = _few(layers)
    few: list[Passes] = []
    try:
        for number in (fewest, number_more):
            decoder.layers, config.num_hidden_layers = nn.ModuleList(layers[:number]), number
            few.append(_count(model, length))
    finally:
        decoder.layers, config.num_hidden_layers = layers, len(layers)
    periods = (len(layers) - fewest) // (number_more - fewest)
    return Passes(*(fewer + periods * (more - fewer) for fewer, more in zip(*few, strict=True)))


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


def _count(model: nn.Module, length: int) -> Passes:
    """Count the FLOPs of the decoder on one row of ``length`` tokens."""
    ids = torch.zeros((1, length), dtype=torch.long, device=next(model.parameters()).device)
    with counting() as counter:
        states = find_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
        forward = counter.get_total_flops()
        if states.requires_grad:
            states.sum().backward()
    return Passes(forward, counter.get_total_flops())


def head_flops(model: PreTrainedModel) -> HeadFlops:
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
        return HeadFlops(flops * (1 + below) + rows, 0 if untied else rows)
    return HeadFlops(flops * (1 + below + bool(trained)), 0)


def flops_before_head(model: nn.Module) -> Passes:
    """Return the FLOPs per position of layers between decoder and LM head (BERT, ModernBERT).

    0 on the meta device, where :class:`LMHead` can't see whether there are any.
    """
    head = LMHead(model)
    if not head.around.before:
        return Passes(0, 0)
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
    return Passes(forward // _POSITIONS, counter.get_total_flops() // _POSITIONS)


def predictor_head_flops(model: nn.Module) -> Passes:
    """Return the FLOPs of the predictor head's linear layers per source embedding."""
    heads = find_heads(model)
    if heads is None or "predictor_head" not in heads:
        return Passes(0, 0)
    layers = [layer for layer in heads["predictor_head"].modules() if isinstance(layer, nn.Linear)]
    products = [2 * layer.in_features * layer.out_features for layer in layers]
    # The forward pass, the gradient of the input embedding, and the gradient of a trained weight.
    times = [2 + layer.weight.requires_grad for layer in layers]
    return Passes(sum(products), sum(product * number for product, number in zip(products, times, strict=True)))
