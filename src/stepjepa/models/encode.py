"""One forward pass of a micro-batch, with the terms of the objective evaluated inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stepjepa.base.json_object import JsonObject
from stepjepa.batch.micro_batch import Batch
from stepjepa.models.architecture import causal_model, find_decoder, find_heads
from stepjepa.models.attention import tree_mask
from stepjepa.models.encoded import Encoded
from stepjepa.models.lm_head import LMHead, with_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


def encode(
    model: nn.Module,
    batch: Batch,
    evaluate: Callable[[Encoded], dict[str, Tensor]],
    *,
    layer: int = -1,
    layers: Sequence[int] = (-1,),
    router_logits: bool = False,
) -> dict[str, Tensor]:
    """Run a micro-batch in one or several passes, and evaluate a function of its hidden states inside the last pass.

    Because ``evaluate`` runs inside the wrapped forward (see :class:`_Hooks`), all parameters are used there, which
    DDP and FSDP rely on, sharded weights are gathered when they are used, and only the logits that ``evaluate``
    computes exist.

    Args:
        model: possibly wrapped (PEFT, DDP, FSDP); prepared by ``attention.enable_trees`` if the batch is of trees.
        batch: on the model's device.
        evaluate: must return every tensor that gradients flow through.
        layer: the layer that embeddings are read from.
        layers: further layers whose hidden states ``evaluate`` reads.
        router_logits: also capture the logits of the routers of a mixture of experts.

    Returns:
        What ``evaluate`` returned.

    Raises:
        ValueError: the model lacks one of the layers, does not call its LM head exactly once in a pass, or returns no
            router logits that can be trained.
    """
    hooks = _Hooks(model, batch, evaluate, layer, sorted({-1, layer, *layers}), router_logits=router_logits)
    with hooks.registered():
        for one_pass in batch.passes:
            with tree_mask(one_pass.trees):
                model(**decoder_inputs(one_pass, hooks.layers))
    if len(hooks.results) != 1:
        name = type(model).__name__
        raise ValueError(f"expected {name} to call its LM head once in a pass, got {len(hooks.results)} calls")
    return hooks.results[0]


class _Hooks:
    """The hooks on a model that evaluate a function inside the forward pass of a micro-batch.

    In each pass, :meth:`capture` keeps the decoder's hidden states. In the last one, :meth:`before_head` calls
    ``evaluate`` on those of all passes. The LM head then gets an empty input, so that it computes no logits.

    Attributes:
        layers: the layers whose hidden states are captured.
        results: what ``evaluate`` returned, once for each call of the LM head in the last pass.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        evaluate: Callable[[Encoded], dict[str, Tensor]],
        layer: int,
        layers: Sequence[int],
        *,
        router_logits: bool,
    ) -> None:
        self.model, self.batch, self.evaluate = model, batch, evaluate
        self.layer, self.layers, self.router_logits = layer, layers, router_logits
        self.head = LMHead(model)
        self.states: list[dict[int, Tensor]] = []  # of each pass
        self.routed: list[tuple[Tensor, ...]] = []  # router logits of each pass
        self.results: list[dict[str, Tensor]] = []

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Register the hooks inside the block."""
        # In a compiled model the first two run uncompiled: what they change lies outside of it.
        decoder = find_decoder(self.model)
        handles = [
            decoder.register_forward_hook(torch.compiler.disable(self.capture)),
            self.head.module.register_forward_pre_hook(torch.compiler.disable(self.before_head)),
            causal_model(self.model).register_forward_hook(self.expose_results),
        ]
        if self.router_logits:
            handles.append(decoder.register_forward_pre_hook(_request_router_logits, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def capture(
        self, decoder: PreTrainedModel, _args: tuple[object, ...], output: ModelOutput | tuple[Tensor, ...]
    ) -> ModelOutput | tuple[Tensor, ...]:
        """Keep the hidden states and router logits of the decoder's output, and return an output of one token."""
        self.states.append({layer: flat_states(output, layer) for layer in self.layers})
        if self.router_logits:
            self.routed.append(flat_router_logits(output, checkpointed=decoder.is_gradient_checkpointing))
        return with_states(output, output[0][:1, :1])

    def before_head(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Evaluate the function in the last pass; return an empty input of the LM head."""
        if len(self.states) == len(self.batch.passes):
            self.results.append(self.evaluate(self.encoded()))
        return (args[0][:, :0],)

    def encoded(self) -> Encoded:
        """Return the hidden states of all passes; flat positions continue from pass to pass."""
        states = self.states[0]
        if len(self.states) > 1:
            states = {layer: torch.cat([one_pass[layer] for one_pass in self.states]) for layer in self.layers}
        routers = tuple(torch.cat(router) for router in zip(*self.routed, strict=True))
        heads = find_heads(self.model) or nn.ModuleDict()
        return Encoded(states, self.batch, self.layer, self.head, heads, routers)

    def expose_results(self, _model: nn.Module, _args: tuple[object, ...], output: ModelOutput) -> ModelOutput:
        """Add the results to the model's output."""
        # DDP finds parameters without a gradient by following the output's graph, so the results must be part of the
        # output. DDP rebuilds the output from its fields, so they must be under a field that its class has.
        if self.results:
            output["hidden_states"] = tuple(self.results[-1].values())
        return output


def _request_router_logits(
    _decoder: nn.Module, args: tuple[object, ...], kwargs: JsonObject
) -> tuple[tuple[object, ...], JsonObject]:
    """Ask the decoder alone for router logits: the model would add its own router loss, over views and padding, too."""
    return args, kwargs | {"output_router_logits": True}


def decoder_inputs(batch: Batch, layers: Sequence[int] = (-1,)) -> dict[str, Tensor | bool]:
    """Return a model's keyword arguments for a batch; a batch of trees must be run under ``attention.tree_mask``."""
    inputs: dict[str, Tensor | bool] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    inputs["use_cache"] = False
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    if set(layers) != {-1}:
        inputs["output_hidden_states"] = True
    return inputs


def flat_states(output: ModelOutput, layer: int) -> Tensor:
    """Return the hidden states of a layer of a decoder's output, ``[R * T, D]``; ValueError if it has no such layer."""
    states = output[0]
    if layer != -1:
        check_layer(len(output.hidden_states) - 1, layer)
        states = output.hidden_states[layer]
    flat: Tensor = states.reshape(-1, states.shape[-1])
    return flat


def flat_router_logits(output: ModelOutput, *, checkpointed: bool = False) -> tuple[Tensor, ...]:
    """Return the logits of each router from a decoder's output, ``[R * T, E]``; ValueError if none can be trained.

    Gradient checkpointing that runs the layers without gradients (``use_reentrant``) leaves the logits without one.
    """
    logits = getattr(output, "router_logits", None)
    if not logits:
        raise ValueError("router_loss: expected a decoder that returns router logits, got none; set router_loss to 0")
    if checkpointed and output[0].requires_grad and not any(router.requires_grad for router in logits):
        raise ValueError(
            "router_loss: the router logits have no gradient under gradient checkpointing with use_reentrant true; set "
            "use_reentrant to false in gradient_checkpointing_kwargs, or router_loss to 0"
        )
    return tuple(router.reshape(-1, router.shape[-1]) for router in logits)


def check_layer(last: int, layer: int, setting: str = "jepa_layer") -> None:
    """Raise ValueError if ``layer`` is out of range for a model of ``last`` layers; the message names ``setting``."""
    if not -last - 1 <= layer <= last:
        raise ValueError(f"{setting}: expected {-last - 1} to {last} for a model of {last} layers, got {layer}")
