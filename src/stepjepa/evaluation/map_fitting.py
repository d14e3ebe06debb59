"""Fit a linear map on the pairs of records; held-out records choose where embeddings are read, and the penalty."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.config.batch_sizes import EMBEDDED
from stepjepa.config.jepa import JepaConfig, Pooling
from stepjepa.data.records import Record, as_records
from stepjepa.data.summarising import system_prompts
from stepjepa.evaluation.retrieval import rank_targets
from stepjepa.models.architecture import number_of_layers
from stepjepa.models.encode import check_layer
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.linear_map import PENALTIES, FittedMap, fit_linear_maps
from stepjepa.objectives.pair_embedding import PairEmbedder
from stepjepa.objectives.reading import ReadoutPlace, ViewEmbeddings
from stepjepa.store.prompts import with_system_prompt

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


def fit_map(embedder: PairEmbedder, records: Sequence[Record], places: Sequence[ReadoutPlace]) -> FittedMap:
    """Fit a linear map on the pairs of records, at the best of several places; records without a pair are noted.

    A tenth of the records, at most :data:`TRIED`, drawn at random, chooses place and penalty; then the map is fitted on
    all of them.

    Args:
        embedder: embeds pairs.
        records: at least :data:`FEWEST`.
        places: where embeddings may be read.

    Raises:
        UserError: a part of the records has no pair.
    """
    count = min(TRIED, len(records) // 10)
    # The file may be sorted.
    drawn = random.Random(0).sample(records, min(count + TRIED, len(records)))
    known, held_out = embedder.at(drawn[count:], places), embedder.at(drawn[:count], places)
    place, penalty = choose(known, held_out, embedder.reader.config)
    pairs = embedder.at(records, [place])[place]
    if pairs.without_pair is not None:
        note(f"not used for the linear map: {pairs.without_pair}")
    (linear_map,) = fit_linear_maps(pairs.source, pairs.target, [penalty])
    return FittedMap(linear_map, place, penalty, len({*pairs.record.tolist()}), tuple(system_prompts(records)))


def fit_linear_map(
    jepa: Jepa,
    records: Iterable[Record | JsonObject],
    *,
    layer: int | None = None,
    pooling: Pooling | None = None,
    batch_size: int = EMBEDDED,
) -> FittedMap:
    """Fit a linear map from source to target embeddings on the pairs of records; the model itself is not trained.

    ``jepa.embed(texts, linear_map=fitted)`` and ``jepa.index(answers, linear_map=fitted)`` embed behind the map. A
    model without a JEPA objective is tried at every layer with both poolings, unless a readout is named.

    Args:
        jepa: any model, also one that was never trained here; its ``system_prompt``, if any, replaces that of records.
        records: pairs that belong together, at least 20; those without a pair, or longer than ``max_length``, are left
            out. A tenth of them, at most 1,000, drawn at random, chooses readout and penalty.
        layer: index of ``hidden_states`` to read, instead of that of training.
        pooling: ``last`` or ``mean``, instead of that of training.
        batch_size: sequences at a time.

    Raises:
        ValueError: the model has no such layer.
        UserError: a record is wrong, there are too few, or a part of them has no pair.

    Example:
        >>> fitted = stepjepa.fit_linear_map(jepa, stepjepa.read_records("train.jsonl"))
        >>> jepa.index(answers, linear_map=fitted).search(["a question"], k=5)
    """
    known = [*as_records(records)]
    if len(known) < FEWEST:
        path = known[0].path if known else None
        raise UserError(f"has {len(known)} records; a linear map is fitted on at least {FEWEST}", path=path)
    if jepa.system_prompt is not None and not jepa.config.plain:
        known = with_system_prompt(known, jepa.system_prompt)
    layers = number_of_layers(jepa.model)
    check_layer(layers, -1 if layer is None else layer, "layer")
    unknown_place = not jepa.has_objective and layer is None and pooling is None
    embedder = jepa.pair_embedder(batch_size, layer=layer, pooling="mean" if unknown_place else pooling)
    return fit_map(embedder, known, places_to_try(embedder.reader.config, layers if unknown_place else None))
