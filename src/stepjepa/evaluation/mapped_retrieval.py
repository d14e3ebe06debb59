"""Retrieval behind a linear map that is fitted on the pairs of a file of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepjepa.base.errors import UserError
from stepjepa.base.files import File
from stepjepa.base.json_object import JsonObject
from stepjepa.data.questions import question_hashes
from stepjepa.data.records import Record
from stepjepa.evaluation.map_fitting import FEWEST, fit_map
from stepjepa.evaluation.retrieval import Retrieval, rank_targets
from stepjepa.objectives.linear_map import FittedMap
from stepjepa.objectives.pair_embedding import PairEmbedder
from stepjepa.objectives.reading import ReadoutPlace


@dataclass(frozen=True)
class MappedRetrieval:
    """Retrieval behind a linear map.

    Attributes:
        retrieval: the ranks of the test records behind the map.
        fitted: the map, where embeddings are read, and the penalty.
        file: the records that the map is fitted on.
        left_out: how many records of the file were not used, because their question is in the test file.
    """

    retrieval: Retrieval
    fitted: FittedMap
    file: str
    left_out: int

    def summary(self) -> JsonObject:
        """Return the summary of the retrieval, and how the map was fitted."""
        fitted = {"records": self.fitted.records, "left_out": self.left_out, "penalty": self.fitted.penalty}
        return {"file": self.file, **fitted, **self.retrieval.summary()}


def not_in_test(records: Sequence[Record], test: Sequence[Record]) -> list[Record]:
    """Return the records whose question, but for case and white space, is in no test record."""
    asked = {question_hashes(record.messages)["normalised"] for record in test}
    return [record for record in records if question_hashes(record.messages)["normalised"] not in asked]


def rank_behind_map(
    embedder: PairEmbedder,
    known: Sequence[Record],
    test: Sequence[Record],
    names: Sequence[str | None],
    places: Sequence[ReadoutPlace],
    *,
    file: File,
) -> MappedRetrieval:
    """Fit a linear map on known records, and rank the distinct targets of test records behind it.

    Place and penalty are chosen as by :func:`~stepjepa.evaluation.map_fitting.fit_map`.

    Args:
        embedder: embeds pairs.
        known: records of ``file``; those whose question is in a test record are left out.
        test: the test records.
        names: of equal answers, see ``retrieval.rank_targets``.
        places: where embeddings may be read; the best is chosen.
        file: for the summary, and for errors.

    Raises:
        UserError: there are fewer than ``FEWEST`` records, or a part of them has no pair.
    """
    fitted = not_in_test(known, test)
    if len(fitted) < FEWEST:
        usable = f"{len(fitted):,} records whose question is not in the test file"
        raise UserError(f"has {usable}; a `linear_map` is fitted on at least {FEWEST}", path=file)
    fit = fit_map(embedder, fitted, places)
    read = replace(embedder.reader.config, jepa_layer=fit.place.layer, pooling=fit.place.pooling)
    retrieval = rank_targets(fit.linear_map.of_pairs(embedder.at(test, [fit.place])[fit.place]), names, read)
    return MappedRetrieval(retrieval, fit, str(file), len(known) - len(fitted))
