"""What the pairs of a whole optimizer step mean for one of its micro-batches (GradCache), see ``pair_cache``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from stepjepa.base.counting import counted


@dataclass(frozen=True)
class CachedTerm:
    """A term's share of a micro-batch: its value, and its gradients with respect to the embeddings of the pairs."""

    share: Tensor  # of the term's sum over the step, in proportion to the pairs of the micro-batch; a scalar
    source: Tensor  # [P, D], gradient of the sum over the step, at least float32
    target: Tensor  # [P, D]

    def sum(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the share, a float32 scalar; its gradients with respect to the embeddings are the cached ones."""
        linear = (source.to(self.source.dtype) * self.source).sum() + (target.to(self.target.dtype) * self.target).sum()
        return self.share + (linear - linear.detach()).to(self.share.dtype)


class RandomState:
    """The state of the random generators of the CPU and of a device, before the first pass of a micro-batch.

    Args:
        tensor: on the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)
        self._kind = tensor.device.type

    def _restore(self) -> None:
        torch.set_rng_state(self._cpu)
        set_device_states(self._devices, self._states, device_type=self._kind)

    @contextmanager
    def replayed(self, tensor: Tensor) -> Iterator[None]:
        """Draw inside what was drawn after this state; afterwards go on as if nothing had been drawn.

        Args:
            tensor: on the device.
        """
        before = RandomState(tensor)
        self._restore()
        try:
            yield
        finally:
            before._restore()


@dataclass(frozen=True)
class CachedPairs:
    """The result of the first pass of a micro-batch; the second one gets it as ``Context.cached``.

    Attributes:
        terms: what was worked out, by the names of the terms that compare pairs.
        target: ``[P, D]`` target embeddings.
        random: the state of random numbers at the first pass, which the second one repeats; None for a micro-batch that
            has no pairs, and so no first pass.
    """

    terms: dict[str, CachedTerm]
    target: Tensor
    random: RandomState | None

    def __repr__(self) -> str:
        return f"CachedPairs({counted(len(self.target), 'pair')} of a step; {', '.join(self.terms)})"
