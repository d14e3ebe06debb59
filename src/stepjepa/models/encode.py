"""One forward pass of a micro-batch, with the terms of the objective evaluated inside it.

Target embeddings may be encoded with an exponential moving average of the trained weights (as in BYOL and I-JEPA).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from stepjepa.base.json_object import JsonObject
from stepjepa.batch.micro_batch import Batch
from stepjepa.models.architecture import causal_model, find_decoder, find_heads
from stepjepa.models.attention import tree_mask
from stepjepa.models.encoded import Encoded
from stepjepa.models.lm_head import LMHead, with_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments
    from transformers.utils import ModelOutput

EMA_FILE = "ema.safetensors"

# Most values of weights that are averaged in one launch.
UPDATED_TOGETHER = 2**26


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

    A hook captures the decoder's output. Another hook, on the LM head, calls ``evaluate`` and then gives the head an
    empty input. So all parameters are used inside the wrapped forward (which DDP and FSDP rely on), sharded weights are
    gathered when they are used, and only the logits that ``evaluate`` computes exist.

    Args:
        model: possibly wrapped (PEFT, DDP, FSDP); prepared by ``attention.enable_trees`` if the batch is of trees.
        batch: on the model's device.
        evaluate: must return every tensor that gradients flow through.
        layer: the layer that embeddings are read from.
        layers: further layers whose hidden states ``evaluate`` reads.
        router_logits: also capture the logits of the routers of a mixture of experts.

    Raises:
        ValueError: the model lacks one of the layers, does not call its LM head exactly once in a pass, or returns no
            router logits that can be trained.
    """
    passes = batch.passes
    captured: list[dict[int, Tensor]] = []  # hidden states of each pass
    routed: list[tuple[Tensor, ...]] = []
    results: list[dict[str, Tensor]] = []
    used = sorted({-1, layer, *layers})
    head = LMHead(model)

    def request_router_logits(
        _decoder: nn.Module, args: tuple[object, ...], kwargs: JsonObject
    ) -> tuple[tuple[object, ...], JsonObject]:
        # Asked of the decoder alone: the model would add its own router loss, over views and padding, too.
        return args, kwargs | {"output_router_logits": True}

    def capture(
        decoder: PreTrainedModel, _args: tuple[object, ...], output: ModelOutput | tuple[Tensor, ...]
    ) -> ModelOutput | tuple[Tensor, ...]:
        captured.append({each: flat_states(output, each) for each in used})
        if router_logits:
            routed.append(flat_router_logits(output, checkpointed=decoder.is_gradient_checkpointing))
        return with_states(output, output[0][:1, :1])

    def before_head(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(captured) == len(passes):
            # Flat positions continue from pass to pass.
            joined = {each: torch.cat([states[each] for states in captured]) for each in used if len(captured) > 1}
            heads = find_heads(model) or nn.ModuleDict()
            routers = tuple(torch.cat(each) for each in zip(*routed, strict=True))
            results.append(evaluate(Encoded(joined or captured[0], batch, layer, head, heads, routers)))
        return (args[0][:, :0],)

    def expose_results(_model: nn.Module, _args: tuple[object, ...], output: ModelOutput) -> ModelOutput:
        # DDP finds parameters without a gradient by following the output's graph, so the results must be part of the
        # output. DDP rebuilds the output from its fields, so they must be under a field that its class has.
        if results:
            output["hidden_states"] = tuple(results[-1].values())
        return output

    # In a compiled model these two run as they are: what they change lies outside of it.
    handles = [
        find_decoder(model).register_forward_hook(torch.compiler.disable(capture)),
        head.module.register_forward_pre_hook(torch.compiler.disable(before_head)),
        causal_model(model).register_forward_hook(expose_results),
    ]
    if router_logits:
        handles.append(find_decoder(model).register_forward_pre_hook(request_router_logits, with_kwargs=True))
    try:
        for each in passes:
            with tree_mask(each.trees):
                model(**decoder_inputs(each, used))
    finally:
        for handle in handles:
            handle.remove()
    if len(results) != 1:
        name = type(model).__name__
        raise ValueError(f"expected {name} to call its LM head once in a pass, got {len(results)} calls")
    return results[0]


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
    if checkpointed and output[0].requires_grad and not any(each.requires_grad for each in logits):
        raise ValueError(
            "router_loss: the router logits have no gradient under gradient checkpointing with use_reentrant true; set "
            "use_reentrant to false in gradient_checkpointing_kwargs, or router_loss to 0"
        )
    return tuple(each.reshape(-1, each.shape[-1]) for each in logits)


def check_layer(last: int, layer: int, setting: str = "jepa_layer") -> None:
    """Raise ValueError if ``layer`` is out of range for a model of ``last`` layers; the message names ``setting``."""
    if not -last - 1 <= layer <= last:
        raise ValueError(f"{setting}: expected {-last - 1} to {last} for a model of {last} layers, got {layer}")


def _groups(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Cut names into lists of at most ``most`` values in all; a larger one gets a list of its own."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


class EmaEncoder(TrainerCallback):
    """A copy of a model whose weights are an exponential moving average of the model's, updated after every step.

    Frozen weights, such as those below an adapter, are shared with the model and take no memory. The model must not be
    wrapped by DDP, nor have heads of terms yet. ``decay`` is the weight of the previous average in every update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self._trained = decay, model
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        shared = {id(p): p for name, p in model.named_parameters() if name not in trained}
        self._model = copy.deepcopy(model, dict(shared)).eval()
        self._weights = {name: p.requires_grad_(False) for name, p in self._model.named_parameters() if name in trained}
        # In half precision most of an update would be rounded away, so the average is kept in float32.
        self._average = {name: p.detach().float() for name, p in self._weights.items()}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.update(self._trained)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Set ``average = decay * average + (1 - decay) * weight``; call it after an optimizer step."""
        trained = {name: parameter.detach() for name, parameter in model.named_parameters() if name in self._average}
        # A GPU updates many weights in one launch; few enough that the copies of 16-bit weights take little memory.
        for names in _groups({name: each.numel() for name, each in trained.items()}, UPDATED_TOGETHER):
            averages = [self._average[name] for name in names]
            torch._foreach_lerp_(averages, [trained[name].float() for name in names], 1 - self.decay)
            torch._foreach_copy_([self._weights[name] for name in names], averages)

    @torch.no_grad()
    def states(self, batch: Batch, layer: int = -1) -> Tensor:
        """Return hidden states ``[R * T, D]`` of a pass of the decoder with the averaged weights, without gradients."""
        decoder, states = find_decoder(self._model), []
        for each in batch.passes:
            with tree_mask(each.trees):
                states.append(flat_states(decoder(**decoder_inputs(each, [layer])), layer))
        return torch.cat(states)

    def save(self, folder: str | Path) -> None:
        """Write the averaged weights into a checkpoint folder."""
        state = {name: value.cpu().contiguous().clone() for name, value in self._average.items()}
        save_file(state, Path(folder) / EMA_FILE)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Read the averaged weights from a checkpoint folder; ValueError if it has none, or those of another model."""
        path = Path(folder) / EMA_FILE
        if not path.is_file():
            raise ValueError(f"expected {EMA_FILE} in {folder}; the checkpoint was made without `target_grad ema`")
        state = load_file(path)
        if state.keys() != self._average.keys():
            raise ValueError(f"expected the averages of {len(self._average)} weights in {path}, got {len(state)}")
        for name, value in state.items():
            self._average[name].copy_(value)
            self._weights[name].copy_(value)
