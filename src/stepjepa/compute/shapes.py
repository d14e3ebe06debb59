"""Copies of models and batches with shapes and dtypes but no values: an 8B model runs in seconds and takes no memory.

Their tensors are fake tensors of torch on the CPU: torch chooses the kernels of the CPU but runs none of them.
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

# Tensors of a batch whose values determine shapes further on, so that an empty batch lacks them: the tokens of averaged
# readouts (left out; averaging costs little more than a single token) and the labels of the prompt (made empty).
_BY_VALUE = ("source_tokens", "source_pair", "target_tokens", "target_pair")
_LABELS_BY_VALUE = ("prompt_row", "prompt_ids")


def copied(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a model, replacing its parameters and buffers by ``change`` of them; tied parameters stay tied."""
    memo: dict[int, Tensor] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(change(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = change(buffer)
    return copy.deepcopy(model, memo)


@contextmanager
def without_values(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of a model with fake tensors, to be run inside the block; the model may be on any device.

    Raises:
        RuntimeError: inside the block, if the model's computation depends on values, or uses a kernel whose result
            shapes torch can't derive (products of experts in float32).
    """
    # An operation that can't run raises an error; torch would log a traceback as well.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _without_padding(model):
            yield copied(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    finally:
        log.disabled = quiet


@contextmanager
def _without_padding(model: nn.Module) -> Iterator[None]:
    """Pass no ``attention_mask`` to the function that makes the model's masks. No batch has padding to be masked, but
    transformers finds that out by reading values; without values it would make a mask."""
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
    """Copy a micro-batch without its values; only for use inside :func:`without_values`.

    A pass computes the LM loss and the prompt loss as one loss over the positions of both.
    """
    empty = Batch({name: value for name, value in batch.items() if name not in _BY_VALUE})
    for name, value in empty.items():
        if isinstance(value, Tensor):
            empty[name] = torch.empty((0,) if name in _LABELS_BY_VALUE else value.shape, dtype=value.dtype)
    if "further" in batch:
        empty["further"] = [empty_batch(each) for each in batch["further"]]
    return empty
