"""Retrieval behind a linear map that is fitted on the pairs of a file of records."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.base.files import File
from stepjepa.base.json_object import JsonObject
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.questions import question_hashes
from stepjepa.data.records import Record
from stepjepa.evaluation.linear_map import PENALTIES, fit_linear_maps
from stepjepa.evaluation.retrieval import Retrieval, rank_targets
from stepjepa.objectives.pair_embedding import PairEmbedder
from stepjepa.objectives.reading import ReadoutPlace, ViewEmbeddings

TRIED = 1000
"""Most records that maps are fitted on while places and penalties are compared, and most that they are compared on."""

FEWEST = 20
"""Fewest records that a map is fitted on."""


class Choice(NamedTuple):
    """Where embeddings are read, and the penalty of the map behind them."""

    place: ReadoutPlace
    penalty: float


def choose(
    known: Mapping[ReadoutPlace, ViewEmbeddings], held_out: Mapping[ReadoutPlace, ViewEmbeddings], config: JepaConfig
) -> Choice:
    """Choose place and penalty by the mean reciprocal rank of held-out pairs behind maps fitted on other pairs.

    Args:
        known: by place, the pairs that maps are fitted on.
        held_out: by place, the pairs that are ranked; only equal texts are right.
        config: the settings by which the views were read.
    """
    best, highest = None, -1.0
    for place, pairs in held_out.items():
        names = [None] * (int(pairs.record.max()) + 1)
        maps = fit_linear_maps(known[place].source, known[place].target)
        for penalty, linear_map in zip(PENALTIES, maps, strict=True):
            rank = rank_targets(linear_map.of_pairs(pairs), names, config).means()["mrr"]
            if rank > highest:
                best, highest = Choice(place, penalty), rank
    if best is None:
        raise ValueError("held_out: expected at least one place, got none")
    return best


@dataclass(frozen=True)
class MappedRetrieval:
    """Retrieval behind a linear map.

    Attributes:
        retrieval: the ranks of the test records behind the map.
        choice: where embeddings are read, and the penalty.
        file: the records that the map is fitted on.
        records: their number.
        left_out: how many records of the file were not used, because their question is in the test file.
    """

    retrieval: Retrieval
    choice: Choice
    file: str
    records: int
    left_out: int

    def summary(self) -> JsonObject:
        """Return the summary of the retrieval, and how the map was fitted."""
        fitted = {"records": self.records, "left_out": self.left_out, "penalty": self.choice.penalty}
        return {"file": self.file, **fitted, **self.retrieval.summary()}


def not_in_test(records: Sequence[Record], test: Sequence[Record]) -> list[Record]:
    """Return the records whose question, but for case and white space, is in no test record."""
    asked = {question_hashes(record.messages)["normalised"] for record in test}
    return [record for record in records if question_hashes(record.messages)["normalised"] not in asked]


def places_to_try(config: JepaConfig, layers: int | None) -> list[ReadoutPlace]:
    """Return where embeddings are tried: where ``config`` reads them, or every layer with both poolings.

    Args:
        config: the settings by which the views are read.
        layers: number of layers, all of which are tried; None to read where ``config`` says.
    """
    if layers is None:
        return [ReadoutPlace(config.jepa_layer, config.pooling)]
    return [
        place for layer in range(layers + 1) for place in (ReadoutPlace(layer, "mean"), ReadoutPlace(layer, "last"))
    ]


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

    A tenth of the known records, at most :data:`TRIED`, drawn at random, chooses place and penalty; then the map is
    fitted on all of them.

    Args:
        embedder: embeds pairs.
        known: records of ``file``; those whose question is in a test record are left out.
        test: the test records.
        names: of equal answers, see ``retrieval.rank_targets``.
        places: where embeddings may be read; the best is chosen.
        file: for the summary, and for errors.

    Raises:
        UserError: there are fewer than :data:`FEWEST` records, or a part of them has no pair.
    """
    fitted = not_in_test(known, test)
    if len(fitted) < FEWEST:
        usable = f"{len(fitted):,} records whose question is not in the test file"
        raise UserError(f"has {usable}; a `linear_map` is fitted on at least {FEWEST}", path=file)
    config = embedder.reader.config
    count = min(TRIED, len(fitted) // 10)
    # The file may be sorted.
    drawn = random.Random(0).sample(fitted, min(count + TRIED, len(fitted)))
    chosen = choose(embedder.at(drawn[count:], places), embedder.at(drawn[:count], places), config)
    known_pairs, test_pairs = (embedder.at(part, [chosen.place])[chosen.place] for part in (fitted, test))
    (linear_map,) = fit_linear_maps(known_pairs.source, known_pairs.target, [chosen.penalty])
    read = replace(config, jepa_layer=chosen.place.layer, pooling=chosen.place.pooling)
    retrieval = rank_targets(linear_map.of_pairs(test_pairs), names, read)
    return MappedRetrieval(retrieval, chosen, str(file), len(fitted), len(known) - len(fitted))
