"""One forward pass that gives the LM loss at labelled positions and embeddings at readouts, and keeps nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepjepa.forests.collate import visibility_of
from stepjepa.forests.masks import Visibility
from stepjepa.models.architecture import find_decoder
from stepjepa.models.attention import forest_visibility
from stepjepa.models.lm_loss import ChunkedLoss, chunked_loss, plain_head


class Outputs(NamedTuple):
    """What the objective needs of a batch.

    Attributes:
        lm_loss: scalar, cross-entropy summed over the labelled positions.
        source: ``[P, D]``, hidden state at the source readouts, through the predictor head if the model has one.
        target: ``[P, D]``, hidden state at the target readouts.
        triples: ``[S, 3, D]``, hidden state at the triples of the main text.
        logits: ``[N, V]``, at the labelled positions; None unless they were asked for.
    """

    lm_loss: Tensor
    source: Tensor
    target: Tensor
    triples: Tensor
    logits: Tensor | None = None


HEAD = "predictor_head"
"""Name of the submodule of a model that maps the source embedding, where there is one."""


def read(flat: Tensor, index: Tensor, pooled: Tensor | None) -> Tensor:
    """Embeddings at readouts.

    Args:
        flat: ``[R * T, D]`` hidden states.
        index: ``[P]`` positions.
        pooled: ``[P]`` how many tokens are averaged, those up to and including the position; None means one.

    Returns:
        ``[P, D]``.
    """
    if pooled is None:
        return flat[index]
    pair = torch.repeat_interleave(torch.arange(len(index), device=index.device), pooled)
    # Counted from the first token of each readout.
    within = torch.arange(len(pair), device=index.device) - (pooled.cumsum(0) - pooled)[pair]
    tokens = flat[(index - pooled + 1)[pair] + within]
    summed = torch.zeros((len(index), flat.shape[-1]), dtype=torch.float32, device=flat.device)
    summed = summed.index_add(0, pair, tokens.float())
    return (summed / pooled[:, None]).to(flat.dtype)


def forward(model: nn.Module, batch: dict[str, Tensor], layer: int = -1, *, keep_logits: bool = False) -> Outputs:
    """Run a batch of ``collate.ForestCollator`` once; see :func:`forward_groups`."""
    return forward_groups(model, [batch], layer, keep_logits=keep_logits)


def forward_groups(
    model: nn.Module, groups: Sequence[dict[str, Tensor]], layer: int = -1, *, keep_logits: bool = False
) -> Outputs:
    """Run all groups of a batch, one pass for each.

    The decoder's output is cut down to the labelled positions by a hook before the model's own head sees it. So all
    parameters are used inside the wrapped forward (which DDP and FSDP rely on), and logits exist only where there are
    labels: for some of them at a time (``lm_loss``), or all at once where the model scales or caps them.

    Args:
        model: a causal language model, possibly wrapped (PEFT, DDP, FSDP); prepared by ``attention.enable_forest`` if
            a group carries a visibility.
        groups: of a batch of ``grouping.GroupCollator``, on the model's device.
        layer: the hidden state that embeddings and triples are read from, as transformers counts ``hidden_states``;
            -1 is the last, after the final norm.
        keep_logits: give out the logits, too.

    Returns:
        The outputs of all groups together, pairs in the order of the groups.

    Raises:
        ValueError: the model has no such hidden state.
    """
    head = None if keep_logits else plain_head(model)
    with chunked_loss(head, [group["label_ids"] for group in groups]) as chunked:
        parts = [_run(model, group, layer, chunked) for group in groups]
    if len(parts) == 1:
        outputs = parts[0]
    else:
        source, target, triples = (torch.cat(tensors) for tensors in zip(*(part[1:4] for part in parts), strict=True))
        logits = torch.cat([part.logits for part in parts if part.logits is not None]) if keep_logits else None
        outputs = Outputs(torch.stack([part.lm_loss for part in parts]).sum(), source, target, triples, logits)
    if chunked.loss is not None:
        return outputs._replace(lm_loss=chunked.loss)
    return outputs if keep_logits else outputs._replace(logits=None)


def _run(model: nn.Module, batch: dict[str, Tensor], layer: int, chunked: ChunkedLoss) -> Outputs:
    """One pass; the loss of its labels is left at 0 where it is taken in chunks."""
    kept: dict[str, Tensor] = {}
    head = find_head(model)

    def cut(_module: nn.Module, _args: Any, output: Any) -> Any:
        hidden = output[0]  # [R, T, D]
        flat = hidden.reshape(-1, hidden.shape[-1])
        states = flat if layer == -1 else hidden_state(output, layer).reshape(flat.shape)
        source = read(states, batch["source_index"], batch.get("source_pooled"))
        kept["source"] = source if head is None else head(source)
        kept["target"] = read(states, batch["target_index"], batch.get("target_pooled"))
        kept["triples"] = states[batch["triple_index"]]
        labelled = flat[batch["label_index"]][None]  # [1, N, D]
        if isinstance(output, tuple):
            return (labelled, *output[1:])
        return type(output)(**{**output, "last_hidden_state": labelled})

    def show(_module: nn.Module, _args: Any, output: Any) -> Any:
        # DDP looks for parameters without a gradient in what the output depends on, and would miss the head's. It makes
        # the output anew from its fields, so this must be one that the class has.
        output["hidden_states"] = (kept["source"],)
        return output

    inputs, visibility = decoder_inputs(batch, layer)
    handles = [find_decoder(model).register_forward_hook(cut)]
    if head is not None:
        handles.append(getattr(model, "module", model).register_forward_hook(show))
    try:
        with forest_visibility(visibility):
            logits = model(**inputs).logits  # [1, N, V]
    finally:
        for handle in handles:
            handle.remove()
    label_ids = batch["label_ids"]
    if chunked.took_over:
        return Outputs(torch.zeros((), device=logits.device), **kept)
    if logits.shape[:2] != torch.Size([1, len(label_ids)]):
        raise ValueError(f"expected logits at {len(label_ids)} positions, got {tuple(logits.shape)}")
    lm_loss = F.cross_entropy(logits[0].float(), label_ids, reduction="sum")
    return Outputs(lm_loss, **kept, logits=logits[0])


def decoder_inputs(batch: dict[str, Tensor], layer: int = -1) -> tuple[dict[str, Any], Visibility | None]:
    """What a model is called with for a batch, and the visibility to call it under."""
    inputs: dict[str, Any] = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "use_cache": False,
    }
    visibility = visibility_of(batch)
    if visibility is not None:
        inputs["position_ids"] = batch["position_ids"]
    if layer != -1:
        inputs["output_hidden_states"] = True
    return inputs, visibility


def check_layer(last: int, layer: int) -> None:
    """Refuse a hidden state that a model of so many layers does not have.

    Raises:
        ValueError: it is out of range.
    """
    if not -last - 1 <= layer <= last:
        raise ValueError(f"jepa_layer: expected {-last - 1} to {last} for a model of {last} layers, got {layer}")


def hidden_state(output: Any, layer: int) -> Tensor:
    """One of the hidden states ``[R, T, D]`` of a decoder's output.

    Raises:
        ValueError: there is none of this number.
    """
    states: Sequence[Tensor] = output.hidden_states
    check_layer(len(states) - 1, layer)
    return states[layer]


def find_head(model: nn.Module) -> nn.Module | None:
    """The predictor head of a model, under any wrapper; None if it has none."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == HEAD:
            return module
    return None
