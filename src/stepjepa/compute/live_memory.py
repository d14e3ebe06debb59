"""How many bytes of tensors a pass keeps at a time, counted as they are made and freed.

Works for tensors that have shapes alone (``shapes``) as for real ones. It sees every tensor that an operation returns,
each storage once, until nothing refers to it any more: what autograd keeps, what checkpointing keeps, gradients under
way, temporary results. It does not see what a kernel uses inside, nor what an allocator loses between blocks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Callable[[Tensor], str]
"""Names what a tensor is, so that bytes can be told apart."""


class LiveMemory(TorchDispatchMode):
    """Counts while it is entered; parameters, buffers and finished gradients of a model are left out.

    Args:
        model: what it is about. Gradients are dropped as soon as they are whole, since they are counted elsewhere.
        kind: of a tensor, asked once for each storage; None tells nothing apart.

    Attributes:
        live: bytes that are kept now.
        peak: the most that was kept at a time.
        at_peak: bytes of each kind at that time.
        gradients: bytes of the gradients that are whole by now.
        peak_with_gradients: the most of both at a time, where gradients are kept from when they are whole.
    """

    def __init__(self, model: nn.Module, kind: Kind | None = None) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.gradients = 0
        self.peak_with_gradients = 0
        self._model = model
        self._kind = kind
        self._live_of: Counter[str] = Counter()
        self._known: dict[int, Any] = {}
        self._whole: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> LiveMemory:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._watch(tensor, size=0)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._drop))
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what came of it."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._watch(value, value.untyped_storage().nbytes())
        if self.live > self.peak:
            self.peak = self.live
            self.at_peak = dict(self._live_of)
        self.peak_with_gradients = max(self.peak_with_gradients, self.live + self.gradients)
        return result

    def _watch(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        kind = self._kind(tensor) if self._kind is not None else ""

        def free(_reference: Any) -> None:
            self.live -= size
            self._live_of[kind] -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, free)
        self.live += size
        self._live_of[kind] += size

    def _drop(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and id(parameter) not in self._whole:
            self._whole.add(id(parameter))
            self.gradients += gradient.untyped_storage().nbytes()
        parameter.grad = None
