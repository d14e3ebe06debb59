"""One forward pass that gives logits at labelled positions and embeddings at readouts, and keeps nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepjepa.architecture import find_decoder
from stepjepa.attention import forest_visibility
from stepjepa.collate import visibility_of


class Outputs(NamedTuple):
    """What the objective needs of a batch.

    Attributes:
        logits: ``[N, V]``, at the labelled positions only.
        source: ``[P, D]``, last hidden state (after the final norm) at the source readouts.
        target: ``[P, D]``, the same at the target readouts.
    """

    logits: Tensor
    source: Tensor
    target: Tensor


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Outputs:
    """Run a batch of ``collate.ForestCollator`` once.

    The decoder's output is cut down to the labelled positions by a hook before the model's own head sees it. So the
    head keeps its model-specific scaling and soft caps, all parameters are used inside the wrapped forward (which DDP
    and FSDP rely on), and logits exist only where there are labels.

    Args:
        model: a causal language model, possibly wrapped (PEFT, DDP, FSDP); prepared by ``attention.enable_forest`` if
            the batch carries a visibility.
        batch: tensors on the model's device.
    """
    kept: dict[str, Tensor] = {}

    def cut(_module: nn.Module, _args: Any, output: Any) -> Any:
        hidden = output[0]  # [R, T, D]
        flat = hidden.reshape(-1, hidden.shape[-1])
        kept["source"] = flat[batch["source_index"]]
        kept["target"] = flat[batch["target_index"]]
        labelled = flat[batch["label_index"]][None]  # [1, N, D]
        if isinstance(output, tuple):
            return (labelled, *output[1:])
        return type(output)(**{**output, "last_hidden_state": labelled})

    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    visibility = visibility_of(batch)
    if visibility is not None:
        inputs["position_ids"] = batch["position_ids"]
    handle = find_decoder(model).register_forward_hook(cut)
    try:
        with forest_visibility(visibility):
            logits = model(**inputs).logits  # [1, N, V]
    finally:
        handle.remove()
    if logits.shape[:2] != torch.Size([1, batch["label_index"].numel()]):
        raise ValueError(f"expected logits at {batch['label_index'].numel()} positions, got {tuple(logits.shape)}")
    return Outputs(logits[0], kept["source"], kept["target"])
