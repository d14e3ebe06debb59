"""Forward and backward pass of embedding rows that an adapter trains, without a copy of the embedding.

PEFT writes the trained rows into a copy of the whole weight in every pass, and autograd computes the gradient of the
whole copy. Here the frozen weight is used as it is, and the outputs of trained rows are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TrainedRows(NamedTuple):
    """Rows of an embedding, or of an LM head that is tied to it, which an adapter trains."""

    ids: Tensor  # [K] of the tokens
    values: Tensor  # [K, D]


def replace_token_layers(model: nn.Module) -> None:
    """Patch PEFT's layers that train embedding rows, in place, to compute these rows alone.

    Results are the same up to rounding, and so are the names and contents of saved files.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__ == "TrainableTokensLayer" and kind.__module__.startswith("peft."):
            layer: Any = module
            # Set on the object: PEFT's class stays as it is. A method, so that a copy of the model gets its own.
            layer.forward_adapters = MethodType(_forward_adapters, layer)


def trained_rows(layer: Any) -> TrainedRows | None:
    """Return the trained rows of a ``TrainableTokensLayer``; None if its adapter is disabled or merged.

    ValueError if several adapters are active at once.
    """
    if layer.disable_adapters or layer.merged or not layer.active_adapters:
        return None
    if len(layer.active_adapters) > 1:
        raise ValueError(f"expected one active adapter, got {', '.join(layer.active_adapters)}; activate one of them")
    (name,) = layer.active_adapters
    values = layer.trainable_tokens_delta[name]
    return TrainedRows(_index_of(layer, name, values.device), values)


def _index_of(layer: Any, name: str, device: torch.device) -> Tensor:
    """Return the token ids on a device; they are copied once, since a copy waits for the device."""
    cache: dict[tuple[str, torch.device], Tensor] = layer.__dict__.setdefault("_index_on_device", {})
    if (name, device) not in cache:
        cache[name, device] = torch.tensor(layer.token_indices[name], device=device)
    return cache[name, device]


def _forward_adapters(self: Any, x: Tensor, active_adapters: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
    """Replace ``TrainableTokensLayer.forward_adapters`` for a single adapter; call PEFT's own for several."""
    output: Tensor
    of_one = list(active_adapters) == list(self.active_adapters) and len(active_adapters) == 1
    rows = trained_rows(self) if of_one else None
    if rows is None:
        output = type(self).forward_adapters(self, x, active_adapters, *args, **kwargs)
        return output
    output = self.base_layer(x)
    values = rows.values.to(self.base_layer.weight.dtype)
    if isinstance(self.base_layer, nn.Embedding):
        # [..., K]: whether each token is each of the trained ones.
        matches = x[..., None] == rows.ids
        trained = F.embedding(matches.int().argmax(-1), values)
        if (scale := self._get_embed_scale()) is not None:
            trained = trained * scale.to(trained.dtype)
        return torch.where(matches.any(-1, keepdim=True), trained.to(output.dtype), output)
    trained = F.linear(x, values)
    return output.index_copy(-1, rows.ids, trained.to(output.dtype))
