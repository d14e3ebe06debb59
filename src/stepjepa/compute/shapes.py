"""Run models and batches that have shapes and dtypes but no values: an 8B model in seconds, in no memory.

Their tensors are turned into torch's fake tensors, which claim to be on the CPU: so the same kernels are chosen,
autocast works, and nothing is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionMaskInterface

from stepjepa.batch.collate import Batch

# Shapes that follow from these depend on values: readouts that average, which cost little more than a single token, and
# the positions that have a label of the prompt.
_BY_VALUE = ("source_tokens", "source_pair", "target_tokens", "target_pair")
_LABELS_BY_VALUE = ("prompt_row", "prompt_ids")


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Let a model on the meta device be run, for its shapes alone, inside the block.

    Args:
        model: its parameters and buffers are exchanged for fake tensors, and put back at the end.

    Raises:
        RuntimeError: from what is run inside, if a model decides by values what it computes, or uses a kernel whose
            shapes torch can't tell (products of experts in float32).
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[int, Tensor] = {}
    # What can't be run is raised, too; a traceback beside that helps nobody.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = log.disabled, True
    with FakeTensorMode(allow_non_fake_inputs=True), _without_padding(model):
        for module in model.modules():
            both: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
            for held in both:
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    places.append((held, name, tensor))
                    if id(tensor) not in made:  # tied weights stay tied
                        made[id(tensor)] = _fake(tensor)
        for held, name, tensor in places:
            held[name] = made[id(tensor)]
        try:
            yield
        finally:
            log.disabled = quiet
            for held, name, tensor in places:
                held[name] = tensor


@contextmanager
def _without_padding(model: nn.Module) -> Iterator[None]:
    """Tell the model's masks that nothing is padded, as in every batch here; transformers would have to read it out of
    values, and makes a mask where there are none."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    made = AttentionMaskInterface().get(name)
    if made is None:
        yield
        return
    AttentionMaskInterface.register(name, lambda *args, **kwargs: made(*args, **{**kwargs, "attention_mask": None}))
    try:
        yield
    finally:
        AttentionMaskInterface.register(name, made)


def _fake(tensor: Tensor) -> Tensor:
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def empty_batch(batch: Batch) -> Batch:
    """A micro-batch without its values; only inside :func:`running`.

    Its pass shows the two losses on next tokens as one, on the positions of both.
    """
    empty = Batch(batch)
    if "further" in batch:
        empty["further"] = [empty_batch(each) for each in batch["further"]]
    for name, value in batch.items():
        if name in _BY_VALUE:
            del empty[name]
        elif isinstance(value, Tensor):
            shape = (0,) if name in _LABELS_BY_VALUE else value.shape
            empty[name] = torch.empty(shape, dtype=value.dtype)
    return empty
