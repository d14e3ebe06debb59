"""The embeddings of views, and where they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.counting import counted


class ReadoutPlace(NamedTuple):
    """Where an embedding is read: index of the layer in transformers' ``hidden_states``, and ``last`` or ``mean``."""

    layer: int
    pooling: Literal["last", "mean"]


@dataclass(frozen=True)
class ViewEmbeddings:
    """The embeddings of all P pairs of some records, in the records' order."""

    source: NDArray[np.float32]  # [P, D]
    target: NDArray[np.float32]  # [P, D]
    record: NDArray[np.int64]  # [P], index of the record of a pair
    pair: NDArray[np.int64]  # [P], number of the pair in its record, from 1; in Step-JEPA that of the source step
    same_target: NDArray[np.int64]  # [P], index of the first pair whose target has the same tokens
    without_pair: str | None = None  # how many records have no pair, and why; None if all have one

    def __repr__(self) -> str:
        pairs, dimensions = self.source.shape
        return f"ViewEmbeddings({counted(pairs, 'pair')}, {counted(dimensions, 'dimension')})"


@dataclass(frozen=True)
class SideEmbeddings:
    """The embeddings of one side of R views, in the order of the inputs and of the views in each."""

    vectors: NDArray[np.float32]  # [R, D]
    index: NDArray[np.int64]  # [R], index of the input of a view
    step: NDArray[np.int64]  # [R], number of the view in its input, from 1

    def __repr__(self) -> str:
        rows, dimensions = self.vectors.shape
        return f"SideEmbeddings({counted(rows, 'view')}, {counted(dimensions, 'dimension')})"
