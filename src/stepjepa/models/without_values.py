"""Copies of a model that share its weights, or have none: an 8B model runs on shapes in seconds and takes no memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def shared(tensor: Tensor) -> Tensor:
    """Return a weight without its gradient, or a copy of a buffer, which a layer may change in training."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def zeros(tensor: Tensor) -> Tensor:
    """Return zeros on the CPU in place of a tensor without values."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def copied(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a model, replacing its parameters and buffers by ``change`` of them; tied parameters stay tied."""
    memo: dict[int, Tensor] = {
        id(p): nn.Parameter(change(p), requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo | {id(buffer): change(buffer) for buffer in model.buffers()})


@contextmanager
def without_values(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of a model with fake tensors, to be run inside the block; the model may be on any device.

    Torch chooses the kernels of the CPU and runs none of them.
    """
    # Torch would log a traceback as well.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield copied(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    finally:
        log.disabled = quiet
