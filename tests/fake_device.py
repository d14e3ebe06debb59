"""A device without values, for tests of what a step asks of a GPU: nothing is computed, shapes and dtypes are real.

On it everything is an error that makes the host of a CUDA device wait (a value that is read, a shape that depends on
values), and so is every operation on tensors of both the host and the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu")
"""The device by name: torch takes its tensors for those of a CPU. Those of the host are the ones that have values."""

# Functions that make tensors of the host unless a device is named.
_MAKERS = {"tensor", "as_tensor", "arange", "zeros", "ones", "full", "empty", "rand", "randn", "linspace", "eye"}
# Methods that read a tensor on the host.
_READERS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}


class _Device(FakeTensorMode):
    """The device; one, even where a model that has tensors of it is copied."""

    def __deepcopy__(self, memo: object) -> _Device:
        return self


class _Sides(TorchFunctionMode):
    """Keeps tensors of the host, which have values, apart from those of the device."""

    def __init__(self, device: _Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        names_device = any(isinstance(leaf, torch.device) for leaf in leaves)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._on_device(func, name, args, kwargs)
        if tensors and name == "to" and names_device:
            return func(self._device.from_tensor(args[0]), *args[1:], **kwargs)
        if tensors or (name in _MAKERS and not names_device):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _on_device(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, FakeTensor):
            if name in _READERS or (name == "to" and "cpu" in (*args[1:], *kwargs.values())):
                raise AssertionError(f"the host waits for the device: Tensor.{name}")
            if name == "__deepcopy__":  # torch's own looks for an address in memory
                copied: Any = tensor.detach().clone().requires_grad_(tensor.requires_grad)
                copied._is_param = getattr(tensor, "_is_param", False)
                args[1][id(tensor)] = copied
                return copied
        return func(*args, **kwargs)


def _from_numpy(array: NDArray[Any], make: Callable[[NDArray[Any]], Tensor] = torch.from_numpy) -> Tensor:
    """Make a tensor of the host; modes of functions are not asked about ``torch.from_numpy``."""
    with unset_fake_temporarily():
        return make(array)


@contextmanager
def fake_device(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of a model on the device; ``to(DEVICE)`` brings other tensors there inside the block."""
    device = _Device()
    memo: dict[int, Any] = {
        id(p): nn.Parameter(device.from_tensor(p.detach()), requires_grad=p.requires_grad) for p in model.parameters()
    }
    copied = copy.deepcopy(model, memo | {id(buffer): device.from_tensor(buffer) for buffer in model.buffers()})
    with device, _Sides(device), patch.object(torch, "from_numpy", _from_numpy):
        yield copied
