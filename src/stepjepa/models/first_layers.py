"""Run a decoder up to the layer behind those that are read: further ones change no hidden state below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from stepjepa.models.architecture import find_decoder, number_of_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STATES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Number of hidden states that a decoder returns for a text."""


@contextmanager
def running_up_to(model: nn.Module, layers: Sequence[int]) -> Iterator[list[int]]:
    """Leave out the layers above the deepest of ``layers`` inside the block, all but one.

    A decoder runs whole if it lacks one of ``layers``, or if its hidden states are not those behind each layer of one
    list. Inside the block of one that does not, the last hidden states are not those of the model.

    Args:
        model: the model, under any wrapper (PEFT, DDP); in evaluation mode.
        layers: indices in transformers' ``hidden_states`` of the whole decoder, at least one.

    Yields:
        The indices of the same hidden states inside the block.
    """
    decoder, last = find_decoder(model), number_of_layers(model)
    read = [layer + last + 1 if layer < 0 else layer for layer in layers]
    # One more than is read: transformers replaces the last hidden states by those after the final norm.
    needed = max(read) + 1
    name = _name_of_layers(decoder, last)
    if needed >= last or min(read) < 0 or name is None or _number_of_states(decoder) != last + 1:
        yield [*layers]
        return
    every: nn.ModuleList = getattr(decoder, name)
    setattr(decoder, name, every[:needed])
    try:
        yield read
    finally:
        setattr(decoder, name, every)


def _name_of_layers(decoder: PreTrainedModel, count: int) -> str | None:
    """Return the name of the decoder's list of ``count`` layers; None if it has no such list, or several."""
    lists = [name for name, part in decoder.named_children() if isinstance(part, nn.ModuleList) and len(part) == count]
    return lists[0] if len(lists) == 1 else None


def _number_of_states(decoder: PreTrainedModel) -> int:
    """Return the number of hidden states that a decoder returns, by running one token through all its layers.

    In the first such run transformers puts its hooks on the layers, once and for all, so none may be missing in it.
    """
    if decoder not in _STATES:
        token = torch.zeros((1, 1), dtype=torch.long, device=decoder.device)
        with torch.no_grad():
            output = decoder(
                input_ids=token, attention_mask=torch.ones_like(token), use_cache=False, output_hidden_states=True
            )
        _STATES[decoder] = len(output.hidden_states)
    return _STATES[decoder]
