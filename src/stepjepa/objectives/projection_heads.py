"""Projection heads: two small networks behind the embeddings of a model that stays as it is.

What they find is the baseline of trained embeddings where no linear map does: an answer that has to be computed may be
in a model's embeddings and yet be no linear function of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stepjepa.views.sequences import Kind

WIDTH, DIMENSIONS = 512, 128
"""Of the hidden layer, and of what heads return."""


class Head(nn.Module):
    """A network with one hidden layer on embeddings ``[N, D]``, each dimension centred and scaled as in the known.

    Args:
        dimensions: D.
        width: of the hidden layer.

    Attributes:
        mean: ``[D]``, subtracted from the embeddings.
        scale: ``[D]``, by which they are divided then.
        network: two linear layers with GELU between.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, dimensions: int, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dimensions, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(dimensions, dtype=torch.float32))
        first, last = (nn.Linear(*shape, dtype=torch.float32) for shape in ((dimensions, width), (width, DIMENSIONS)))
        self.network = nn.Sequential(first, nn.GELU(), last)

    @classmethod
    def of(cls, known: Tensor, width: int = WIDTH) -> Self:
        """Make an untrained head of some width for embeddings like the known ones ``[N, D]``."""
        head = cls(known.shape[1], width)
        head.mean, deviation = known.mean(0), known.std(0)
        # Divided by hardly anything, the rounding of a dimension that is constant would be all that one sees of it.
        varies = deviation > 1e-5 * head.mean.abs()
        head.scale = torch.where(varies, deviation + 1e-6, torch.ones_like(deviation))
        return head

    def forward(self, vectors: Tensor) -> Tensor:
        """Return ``[N, 128]``."""
        mapped: Tensor = self.network((vectors - self.mean) / self.scale)
        return mapped


@dataclass(frozen=True, eq=False)
class ProjectionHeads:
    """Two trained heads.

    Attributes:
        source: maps source embeddings ``[N, D]`` to ``[N, 128]``.
        target: maps target embeddings.
        epochs: of their training.
    """

    source: Head
    target: Head
    epochs: int

    @property
    def dimensions(self) -> int:
        """D."""
        return len(self.source.mean)

    @torch.no_grad()
    def __call__(self, vectors: NDArray[np.float32], side: Kind) -> NDArray[np.float32]:
        """Return sources or targets ``[N, 128]`` behind their head: those of a pair are near each other."""
        head = self.source if side == "source" else self.target
        mapped: NDArray[np.float32] = head(torch.tensor(vectors, dtype=torch.float32)).numpy()
        return mapped

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return all weights, by which :meth:`of_arrays` makes the same heads."""
        return {
            f"{side}.{name}": weight.numpy().copy()
            for side, head in (("source", self.source), ("target", self.target))
            for name, weight in head.state_dict().items()
        }

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[np.float32]], epochs: int) -> Self:
        """Make heads of their weights."""

        def head(side: str) -> Head:
            with torch.device("meta"):  # draws no first weights
                made = Head(len(arrays[f"{side}.mean"]))
            weights = {name: torch.tensor(arrays[f"{side}.{name}"]) for name in made.state_dict()}
            made.load_state_dict(weights, assign=True)
            return made

        return cls(head("source"), head("target"), epochs)
