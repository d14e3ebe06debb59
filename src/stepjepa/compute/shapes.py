"""Copies of models and batches that have shapes and dtypes but no values: an 8B model runs in seconds, in no memory.

Their tensors are fake tensors of torch, which claim to be on the CPU: so the same kernels are chosen, and none runs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionMaskInterface

from stepjepa.batch.collate import Batch

# Shapes that follow from these depend on values: readouts that average, which cost little more than a single token, and
# the positions that have a label of the prompt.
_BY_VALUE = ("source_tokens", "source_pair", "target_tokens", "target_pair")
_LABELS_BY_VALUE = ("prompt_row", "prompt_ids")


def copied(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with other tensors in the place of its parameters and buffers; tied ones stay tied."""
    memo: dict[int, Tensor] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(change(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = change(buffer)
    return copy.deepcopy(model, memo)


@contextmanager
def without_values(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of a model, on any device, to be run for its shapes alone inside the block.

    Raises:
        RuntimeError: from what is run inside, if a model decides by values what it computes, or uses a kernel whose
            shapes torch can't tell (products of experts in float32).
    """
    # What can't be run is raised, too; a traceback beside that helps nobody.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _without_padding(model):
            yield copied(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    finally:
        log.disabled = quiet


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


def empty_batch(batch: Batch) -> Batch:
    """A micro-batch without its values; only inside :func:`without_values`.

    Its pass shows the two losses on next tokens as one, on the positions of both.
    """
    empty = Batch({name: value for name, value in batch.items() if name not in _BY_VALUE})
    for name, value in empty.items():
        if isinstance(value, Tensor):
            empty[name] = torch.empty((0,) if name in _LABELS_BY_VALUE else value.shape, dtype=value.dtype)
    if "further" in batch:
        empty["further"] = [empty_batch(each) for each in batch["further"]]
    return empty
