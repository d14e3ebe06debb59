"""Retrieval behind a linear map, or behind projection heads, fitted on the pairs of a file of records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.evaluation.retrieval import Retrieval, rank_targets
from stepjepa.objectives.fitted import Fitted, FittedHeads, pairs_behind
from stepjepa.objectives.pair_embedding import PairEmbedder
from stepjepa.objectives.reading import at_place


@dataclass(frozen=True)
class MappedRetrieval:
    """Retrieval behind a map.

    Attributes:
        retrieval: the ranks of the test records behind the map.
        fitted: the map, where embeddings are read, and the fit.
        file: the records that the map is fitted on.
        left_out: how many records of the file were not used, because their question is in the test file.
        every_layer: whether it was tried at every layer, heads also at all at once; else where the user named.
    """

    retrieval: Retrieval
    fitted: Fitted
    file: str
    left_out: int
    every_layer: bool

    def summary(self) -> JsonObject:
        """Return the summary of the retrieval, and how the map was fitted."""
        fitted = {"records": self.fitted.records, "left_out": self.left_out, "every_layer": self.every_layer}
        summary = {"file": self.file, **fitted, **self.fitted.facts(), **self.retrieval.summary()}
        summary["readout"]["layer"] = self.fitted.place.layer
        if isinstance(self.fitted, FittedHeads):
            summary["all_layers"] = self.every_layer
        if not self.fitted.place.predictors:
            summary["readout"]["predictors"] = 0
        return summary


def rank_behind_map(
    embedder: PairEmbedder,
    fitted: Fitted,
    test: Sequence[Record],
    names: Sequence[str | None],
    *,
    file: str | os.PathLike[str],
    left_out: int,
    every_layer: bool,
) -> MappedRetrieval:
    """Rank the distinct targets of test records behind a map.

    Args:
        embedder: embeds pairs, as for the records that the map was fitted on.
        fitted: the map.
        test: the test records.
        names: of equal answers, see ``retrieval.rank_targets``.
        file: the records that the map was fitted on, for the summary.
        left_out: number of records of that file that were left out, since their question is in the test file.
        every_layer: whether the map was tried at every layer.
    """
    place = fitted.place
    config = at_place(embedder.reader.config, place)
    pairs = embedder.at(test, [place])[place]
    retrieval = rank_targets(pairs_behind(fitted.vector_map, pairs), names, config)
    return MappedRetrieval(retrieval, fitted, str(file), left_out, every_layer)
