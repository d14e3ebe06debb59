"""The embeddings of views, and where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.counting import counted

ALL_LAYERS: Final = "all"
"""The layer of a place where the embeddings of all layers are read, one behind the other as one vector."""


class ReadoutPlace(NamedTuple):
    """Where an embedding is read.

    Attributes:
        layer: index in transformers' ``hidden_states``; 0 is the input embeddings, -1 the last. ``all`` joins those of
            all layers to one vector.
        pooling: ``last`` token or ``mean`` of the tokens.
        predictors: read views as in training, with predictor tokens if it had any; False reads the texts alone.
    """

    layer: int | Literal["all"]
    pooling: Literal["last", "mean"]
    predictors: bool = True

    @property
    def words(self) -> str:
        """The place in words."""
        layer = "all layers" if self.layer == ALL_LAYERS else f"layer {self.layer}"
        return f"{layer}, pooling {self.pooling}{'' if self.predictors else ', without predictor tokens'}"

    def layers(self, last: int) -> Sequence[int]:
        """Return the layers that are read, of a model whose last one is ``last``."""
        return range(last + 1) if self.layer == ALL_LAYERS else [self.layer]


@dataclass(frozen=True)
class ViewEmbeddings:
    """The embeddings of all P pairs of some records, in the records' order.

    Attributes:
        source: ``[P, D]`` float32.
        target: ``[P, D]`` float32.
        record: ``[P]`` index of the record of a pair.
        pair: ``[P]`` number of the pair in its record, from 1; in Step-JEPA that of the source step.
        same_target: ``[P]`` index of the first pair whose target has the same tokens.
        without_pair: how many records have no pair, and why; None if all have one.
    """

    source: NDArray[np.float32]
    target: NDArray[np.float32]
    record: NDArray[np.int64]
    pair: NDArray[np.int64]
    same_target: NDArray[np.int64]
    without_pair: str | None = None

    def __repr__(self) -> str:
        pairs, dimensions = self.source.shape
        return f"ViewEmbeddings({counted(pairs, 'pair')}, {counted(dimensions, 'dimension')})"


@dataclass(frozen=True)
class SideEmbeddings:
    """The embeddings of one side of R views, in the order of the inputs and of the views in each.

    Attributes:
        vectors: ``[R, D]`` float32.
        index: ``[R]`` index of the input of a view.
        step: ``[R]`` number of the view in its input, from 1.
    """

    vectors: NDArray[np.float32]
    index: NDArray[np.int64]
    step: NDArray[np.int64]

    def __repr__(self) -> str:
        rows, dimensions = self.vectors.shape
        return f"SideEmbeddings({counted(rows, 'view')}, {counted(dimensions, 'dimension')})"
