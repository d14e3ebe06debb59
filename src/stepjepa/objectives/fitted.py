"""A map of embeddings that was fitted on known pairs, whatever its kind: behind it partners are near each other."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.counting import counted
from stepjepa.base.json_object import JsonObject
from stepjepa.objectives.linear_map import Fit, LinearMap
from stepjepa.objectives.projection_heads import ProjectionHeads
from stepjepa.objectives.view_embeddings import ReadoutPlace, ViewEmbeddings
from stepjepa.views.sequences import Kind

_Embeddings = NDArray[np.float32]


class VectorMap(Protocol):
    """Maps the embeddings of each side to vectors that can be compared: ``LinearMap`` and ``ProjectionHeads``."""

    @property
    def dimensions(self) -> int:
        """D, of the embeddings that it was fitted on."""

    def __call__(self, vectors: _Embeddings, side: Kind) -> _Embeddings:
        """Return sources or targets ``[N, D]`` behind the map: those of a pair are near each other."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything that the map consists of, by name."""


def sides_behind(vector_map: VectorMap, sources: _Embeddings, targets: _Embeddings) -> tuple[_Embeddings, _Embeddings]:
    """Return sources and targets behind a map."""
    return vector_map(sources, "source"), vector_map(targets, "target")


def pairs_behind(vector_map: VectorMap, pairs: ViewEmbeddings) -> ViewEmbeddings:
    """Return the pairs with their sources and targets as a map gives them."""
    source, target = sides_behind(vector_map, pairs.source, pairs.target)
    return replace(pairs, source=source, target=target)


class Fitted(ABC):
    """A map that was fitted on the pairs of some records, and the embeddings that it belongs to.

    Attributes:
        name: of maps of this kind, in files.
        kind: what a map of this kind is called in messages.
        made: that it was made, in messages.
        place: where the embeddings in front of the map are read.
        records: number of records that it was fitted on.
        system_prompts: their most frequent system prompts; None stands for records without one.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    made: ClassVar[str]
    place: ReadoutPlace
    records: int
    system_prompts: Sequence[str | None]

    @property
    @abstractmethod
    def vector_map(self) -> VectorMap:
        """The map itself."""

    @property
    @abstractmethod
    def fit_text(self) -> str:
        """How the map was fitted, in words."""

    @abstractmethod
    def facts(self) -> JsonObject:
        """Return how the map was fitted."""

    @classmethod
    @abstractmethod
    def of_arrays(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        facts: JsonObject,
        place: ReadoutPlace,
        records: int,
        system_prompts: Sequence[str | None],
    ) -> Self:
        """Make a map of what :attr:`vector_map` consists of, and of :meth:`facts`."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the vectors behind the map depend on, but for the model."""
        digest = hashlib.sha256(f"{self.place} {self.system_prompts}".encode())
        for values in self.vector_map.arrays().values():
            digest.update(values.tobytes())
        return digest.hexdigest()

    def __call__(self, vectors: _Embeddings, side: Kind) -> _Embeddings:
        """Return sources or targets ``[N, D]``, read at ``place``, as the map gives them.

        ValueError for vectors with other dimensions than those that the map was fitted on, or another side.
        """
        expected = self.vector_map.dimensions
        if vectors.shape[1:] != (expected,):
            fault = f"vectors: expected [N, {expected}] as {self.made} on, got {[*vectors.shape]}"
            raise ValueError(f"{fault}; fit one for this model")
        if side not in ("source", "target"):
            raise ValueError(f"side: expected 'source' or 'target', got {side!r}")
        return self.vector_map(vectors, side)

    def describe(self, file: str) -> str:
        """Describe the map for a user who named the file of its records."""
        return f"{self.made} on {self._records} of {file}: {self._readout}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._records}, {self._readout})"

    @property
    def _records(self) -> str:
        return counted(self.records, "record")

    @property
    def _readout(self) -> str:
        return f"{self.place.words}, {self.fit_text}"


@dataclass(frozen=True, eq=False, repr=False)
class FittedMap(Fitted):
    """A linear map that was fitted on the pairs of some records, and the embeddings that it belongs to.

    Attributes:
        linear_map: the map.
        place: where the embeddings in front of it are read.
        fit: how the map was fitted, one of :data:`FITS`.
        records: number of records that it was fitted on.
        system_prompts: their most frequent system prompts; None stands for records without one.
    """

    name: ClassVar[str] = "linear_map"
    kind: ClassVar[str] = "a linear map"
    made: ClassVar[str] = "the linear map is fitted"

    linear_map: LinearMap
    place: ReadoutPlace
    fit: Fit
    records: int
    system_prompts: Sequence[str | None] = ()

    @property
    def vector_map(self) -> LinearMap:
        """The map itself."""
        return self.linear_map

    @property
    def fit_text(self) -> str:
        """How the map was fitted, in words."""
        return f"{self.fit.method} fit, penalty {self.fit.penalty:g}"

    def facts(self) -> JsonObject:
        """Return how the map was fitted."""
        return {"fit": self.fit.method, "penalty": self.fit.penalty}

    @classmethod
    def of_arrays(
        cls,
        arrays: Mapping[str, NDArray[np.float64]],
        facts: JsonObject,
        place: ReadoutPlace,
        records: int,
        system_prompts: Sequence[str | None],
    ) -> Self:
        """Make a map of its arrays and its facts."""
        return cls(LinearMap(**arrays), place, Fit(facts["fit"], facts["penalty"]), records, system_prompts)


@dataclass(frozen=True, eq=False, repr=False)
class FittedHeads(Fitted):
    """Projection heads that were trained on the pairs of some records, and the embeddings that they belong to.

    Attributes:
        heads: the heads.
        place: where the embeddings in front of them are read.
        records: number of records that they were trained on.
        system_prompts: their most frequent system prompts; None stands for records without one.
    """

    name: ClassVar[str] = "projection_heads"
    kind: ClassVar[str] = "projection heads"
    made: ClassVar[str] = "the projection heads are trained"

    heads: ProjectionHeads
    place: ReadoutPlace
    records: int
    system_prompts: Sequence[str | None] = ()

    @property
    def vector_map(self) -> ProjectionHeads:
        """The heads themselves."""
        return self.heads

    @property
    def fit_text(self) -> str:
        """How long the heads were trained, in words."""
        return counted(self.heads.epochs, "epoch")

    def facts(self) -> JsonObject:
        """Return how the heads were trained."""
        return {"epochs": self.heads.epochs}

    @classmethod
    def of_arrays(
        cls,
        arrays: Mapping[str, NDArray[np.float32]],
        facts: JsonObject,
        place: ReadoutPlace,
        records: int,
        system_prompts: Sequence[str | None],
    ) -> Self:
        """Make heads of their weights and their facts."""
        return cls(ProjectionHeads.of_arrays(arrays, facts["epochs"]), place, records, system_prompts)
