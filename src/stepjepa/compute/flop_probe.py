"""What a model multiplies in a pass, derived from its modules: FLOPs per token, per query and key, per label, per pair.

A row of two tokens is run to see which modules are called, in which order, and how far down gradients are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.modeling_layers import GradientCheckpointingLayer

from stepjepa.models.architecture import find_decoder
from stepjepa.models.heads import find_heads

# Tokens of the row that is run to see what a model calls; two, so that nothing is squeezed away.
TOKENS = 2

# Where families write how many experts a token is sent to.
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class Cost:
    """FLOPs of one direction of a pass.

    Attributes:
        token: for each token of the rows, padding included.
        square: for each (query, key) of a row: attention.
        label: for each labelled position: the head.
        pair: for each pair: the predictor head.
        fixed: once: PEFT builds the adapted weights of experts anew in every pass.
    """

    token: int = 0
    square: int = 0
    label: int = 0
    pair: int = 0
    fixed: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a module in the probe: a matrix (FLOPs of the whole probe), or something that only marks its place.

    Attributes:
        module: what was called.
        flops: of its products.
        backward: FLOPs of the gradients that are needed of input and weights.
        exact: see ``FlopModel``.
        is_head: it stands between the decoder and the logits.
        trains_rows_only: the weight is frozen but for some rows.
    """

    module: nn.Module
    flops: int = 0
    backward: int = 0
    exact: bool = True
    is_head: bool = False
    trains_rows_only: bool = False


@dataclass(frozen=True)
class Attention:
    """Products of one attention layer for each query and key."""

    module: nn.Module
    forward: int
    backward: int


@dataclass(frozen=True)
class Costs:
    """Both directions; see ``flops.FlopModel`` for the rest."""

    forward: Cost
    backward: Cost
    token_rows: int
    exact: bool


def derive(model: nn.Module, *, gradient_checkpointing: bool, reentrant: bool) -> Costs:
    """What a pass costs; arguments as of ``flops.FlopModel.of``."""
    decoder = find_decoder(model)
    calls, attentions = _probe(model, decoder)
    head = next((call for call in calls if call.is_head), None)
    below = [call for call in calls if not call.is_head]
    token = sum(call.flops for call in below) // TOKENS
    token_backward = sum(call.backward for call in below) // TOKENS
    square = sum(attention.forward for attention in attentions)
    square_backward = sum(attention.backward for attention in attentions)
    fixed, fixed_backward = _expert_adapters(decoder)
    if gradient_checkpointing:
        again = _run_again(decoder, below, attentions, reentrant=reentrant)
        token_backward += again.token
        square_backward += again.square
        fixed_backward += fixed
    pair, pair_backward = _predictor_head(model)
    label = head.flops // TOKENS if head else 0
    label_backward = head.backward // TOKENS if head else 0
    return Costs(
        Cost(token, square, label, pair, fixed),
        Cost(token_backward, square_backward, label_backward, pair_backward, fixed_backward),
        token_rows=label if head and head.trains_rows_only else 0,
        exact=all(call.exact for call in below),
    )


def _probe(model: nn.Module, decoder: nn.Module) -> tuple[list[Call], list[Attention]]:
    """Everything that multiplies matrices or keeps tensors for the backward pass, in the order of the calls."""
    config: Any = decoder.config
    calls: list[Call] = []
    attentions: list[Attention] = []
    handles = []

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        values = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if values is not None:
            calls.append(_matrix_call(module, values, config))

    def watch_attention(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        attentions.append(_attention(module, hidden, config))

    def watch_head(module: nn.Module, args: tuple[Any, ...], _kwargs: Any, output: Tensor) -> None:
        calls.append(_head_call(module, args[0], output))

    for module in decoder.modules():
        if hasattr(module, "is_causal"):
            handles.append(module.register_forward_hook(watch_attention, with_kwargs=True))
        elif _keeps_tensors(module):
            handles.append(module.register_forward_hook(watch, with_kwargs=True))
    head = model.get_output_embeddings()  # type: ignore[operator]  # a method of every PreTrainedModel
    if head is not None:
        handles.append(head.register_forward_hook(watch_head, with_kwargs=True))
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    try:
        model.eval()
        with torch.enable_grad():
            ids = torch.zeros((1, TOKENS), dtype=torch.long, device=device)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return calls, attentions


def _keeps_tensors(module: nn.Module) -> bool:
    """Whether a module is a step of its own that the backward pass needs tensors of."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    return any(True for _ in module.parameters(recurse=False)) and not isinstance(module, nn.Embedding)


def _matrix_call(module: nn.Module, values: Tensor, config: Any) -> Call:
    rows = values.numel() // values.shape[-1]
    weights = _weights(module)
    exact = True
    if isinstance(module, nn.Linear):
        # The shape of a quantized weight says nothing.
        products = {module.weight: module.in_features * module.out_features}
    elif isinstance(module, nn.modules.conv._ConvNd):
        products = {}
    elif any(weight.ndim == 3 for weight in weights):
        # Experts fused to one tensor; their biases have two dimensions.
        active = next((getattr(config, name) for name in _ACTIVE_EXPERTS if getattr(config, name, None)), None)
        exact = active is not None
        products = {w: w.numel() // w.shape[0] * (active or w.shape[0]) for w in weights if w.ndim == 3}
    elif any(True for _ in module.children()) and not is_parametrized(module):
        products = {}
    else:
        # Transposed linear layers (GPT-2), routers.
        products = {w: w.numel() for w in weights if w.ndim == 2}
    forward = {weight: 2 * rows * product for weight, product in products.items()}
    backward = sum(flops * (values.requires_grad + weight.requires_grad) for weight, flops in forward.items())
    return Call(module, sum(forward.values()), backward, exact)


def _weights(module: nn.Module) -> list[Tensor]:
    """A module's own tensors of two or more dimensions, those that an adapter puts in their place among them."""
    replaced = list(module.parametrizations) if is_parametrized(module) else []  # type: ignore[arg-type]  # a ModuleDict
    own = [*module.parameters(recurse=False), *(getattr(module, name) for name in replaced)]
    return [weight for weight in own if weight.ndim > 1]


def _head_call(module: nn.Module, hidden: Tensor, logits: Tensor) -> Call:
    rows = hidden.numel() // hidden.shape[-1]
    size = hidden.shape[-1] * logits.shape[-1]
    trained = [weight for weight in module.parameters() if weight.requires_grad and weight.ndim > 1]
    # To train some rows PEFT writes them into a copy of the weight, and autograd takes the gradient of all of it.
    rows_only = bool(trained) and all(weight.numel() < size for weight in trained)
    flops = 2 * rows * size
    return Call(module, flops, flops * (hidden.requires_grad + bool(trained)), True, True, rows_only)


def _attention(module: nn.Module, hidden: Tensor, config: Any) -> Attention:
    settings = getattr(module, "config", config)
    heads = getattr(module, "num_heads", None) or settings.num_attention_heads
    size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    size = size or getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    # Query and key may be wider than the value.
    key = getattr(module, "qk_head_dim", None) or size
    value = getattr(module, "v_head_dim", None) or size
    dropout = getattr(module, "attention_dropout", getattr(module, "attn_dropout", 0.0))
    dropout = dropout.p if isinstance(dropout, nn.Dropout) else dropout
    # The CPU's fused kernel knows neither dropout nor unequal widths; torch then multiplies as eager attention does.
    plain = "eager" in str(settings._attn_implementation)
    plain = plain or (hidden.device.type == "cpu" and (bool(dropout) or key != value))
    forward = 2 * heads * (key + value)
    # Each product has two gradients; fused kernels keep no scores and compute them once more.
    backward = 2 * forward + (0 if plain else 2 * heads * key)
    return Attention(module, forward, backward if hidden.requires_grad else 0)


def _run_again(decoder: nn.Module, calls: Sequence[Call], attentions: Sequence[Attention], *, reentrant: bool) -> Cost:
    """The forward FLOPs of the blocks that gradient checkpointing runs a second time."""
    owner: dict[nn.Module, nn.Module] = {}
    for block in decoder.modules():
        if isinstance(block, GradientCheckpointingLayer):
            for module in block.modules():
                owner.setdefault(module, block)
    inside: dict[nn.Module, list[Call]] = {}
    for call in calls:
        if call.module in owner:
            inside.setdefault(owner[call.module], []).append(call)
    trained = {block for block, members in inside.items() if any(call.backward for call in members)}
    flops = sum(call.flops for block in trained for call in inside[block])
    if not reentrant:
        # It stops at the last tensor that is kept: a product that nothing which keeps tensors follows is not needed.
        flops -= sum(inside[block][-1].flops for block in trained if _is_plain_product(inside[block][-1].module))
    square = sum(attention.forward for attention in attentions if owner.get(attention.module) in trained)
    return Cost(token=flops // TOKENS, square=square)


def _expert_adapters(decoder: nn.Module) -> tuple[int, int]:
    """Forward and backward FLOPs of PEFT's adapters on fused tensors: factors multiplied out to the whole tensor."""
    forward = backward = 0
    module: Any
    for module in decoder.modules():
        if hasattr(module, "get_param") and hasattr(module, "lora_A"):
            experts = getattr(module, "num_experts", 1)
            for name in set(module.active_adapters) & set(module.lora_A):
                rank = module.lora_A[name].weight.shape[0] // experts
                flops = 2 * rank * module.get_param().numel()
                # To put the tensor of several experts in its place, torch tries it out first.
                forward += flops * (2 if experts > 1 else 1)
                backward += 2 * flops
    return forward, backward


def _is_plain_product(module: nn.Module) -> bool:
    weights = [weight.ndim for weight in module.parameters(recurse=False)]
    return isinstance(module, nn.Linear) or (max(weights, default=0) == 2 and not isinstance(module, nn.Embedding))


def _predictor_head(model: nn.Module) -> tuple[int, int]:
    """Forward and backward FLOPs of a source embedding in all linear layers of the predictor head."""
    heads = find_heads(model)
    if heads is None or "predictor_head" not in heads:
        return 0, 0
    layers = [layer for layer in heads["predictor_head"].modules() if isinstance(layer, nn.Linear)]
    sizes = {layer: 2 * layer.in_features * layer.out_features for layer in layers}
    # The embedding that goes in always needs a gradient.
    backward = sum(size * (1 + layer.weight.requires_grad) for layer, size in sizes.items())
    return sum(sizes.values()), backward
