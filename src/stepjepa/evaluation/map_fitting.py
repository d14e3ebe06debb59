"""Fit a linear map or projection heads on the pairs of records.

Held-out records choose where embeddings are read, and the fit or the epochs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tqdm import tqdm

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.terminal import note
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.questions import not_in_test
from stepjepa.data.record import Record
from stepjepa.data.summarising import system_prompts
from stepjepa.evaluation.retrieval import rank_targets
from stepjepa.objectives.fitted import FittedHeads, FittedMap, pairs_behind
from stepjepa.objectives.head_training import STEPS_TRIED, epochs_of, fit_heads
from stepjepa.objectives.linear_map import FITS, Fit, fit_linear_maps
from stepjepa.objectives.pair_embedding import PairEmbedder
from stepjepa.objectives.projection_heads import ProjectionHeads
from stepjepa.objectives.view_embeddings import ALL_LAYERS, ReadoutPlace, ViewEmbeddings

MOST_COMPARED = 1000
"""Most records that maps are fitted on while places and fits are compared, and most that they are compared on."""

FINALISTS = 3
"""Places behind which projection heads are trained to the end."""

MOST_BYTES = 4_000_000_000
"""Most bytes of the embeddings of all layers at once, behind which projection heads are trained."""

FEWEST_RECORDS = 20
"""Fewest records with a pair that a map is fitted on."""
_NEEDED = f"linear maps and projection heads are fitted on at least {FEWEST_RECORDS}"

FEW_HELD_OUT = 10
"""Fewest held-out records that choose a map without a note that they are few."""

POOLINGS: tuple[Literal["mean", "last"], ...] = ("mean", "last")


class Choice(NamedTuple):
    """Where embeddings are read, and how the map behind them is fitted."""

    place: ReadoutPlace
    fit: Fit


def choose_readout(
    known: Mapping[ReadoutPlace, ViewEmbeddings], held_out: Mapping[ReadoutPlace, ViewEmbeddings], config: JepaConfig
) -> Choice:
    """Choose place and fit by the mean reciprocal rank of held-out pairs behind maps fitted on other pairs.

    Args:
        known: by place, the pairs that maps are fitted on.
        held_out: by place, the pairs that are ranked; only equal texts are right.
        config: the settings by which the views were read.
    """
    best, highest = None, -1.0
    for place, pairs in held_out.items():
        names = [None] * (int(pairs.record.max()) + 1)
        maps = fit_linear_maps(known[place].source, known[place].target)
        for fit, linear_map in zip(FITS, maps, strict=True):
            rank = rank_targets(pairs_behind(linear_map, pairs), names, config).means()["mrr"]
            if rank > highest:
                best, highest = Choice(place, fit), rank
    if best is None:
        raise ValueError("held_out: expected at least one place, got none")
    return best


def places_to_try(
    own: ReadoutPlace, layers: int | None, *, has_objective: bool = False, all_layers: bool = False
) -> list[ReadoutPlace]:
    """Return where embeddings are tried: at every layer with both poolings, whatever the model was trained with.

    So no model has a choice that another one lacks, and what is found behind their maps can be compared.

    Args:
        own: where the settings read embeddings.
        layers: number of layers of the model; None to try ``own`` alone.
        has_objective: the model was trained with a JEPA objective: ``own`` is tried, too, and texts without the
            predictor tokens of its training elsewhere.
        all_layers: the means of all layers at once are tried, too.
    """
    if layers is None:
        return [own]
    tried = [(layer, pooling) for layer in range(layers + 1) for pooling in POOLINGS]
    everywhere = [ReadoutPlace(*place, predictors=not has_objective) for place in tried]
    if all_layers:
        everywhere.append(ReadoutPlace(ALL_LAYERS, "mean", predictors=not has_objective))
    return [own, *everywhere] if has_objective else everywhere


@dataclass(frozen=True)
class DrawnPairs:
    """The pairs of some records, by which it is chosen where embeddings are read in front of a map.

    Attributes:
        embedder: embeds pairs.
        records: all records.
        known: by place, the pairs that the maps to choose from are fitted on.
        held_out: by place, the pairs that these are compared on.
        held_out_records: the records of those.
    """

    embedder: PairEmbedder
    records: Sequence[Record]
    known: Mapping[ReadoutPlace, ViewEmbeddings]
    held_out: Mapping[ReadoutPlace, ViewEmbeddings]
    held_out_records: Sequence[Record]


def draw_pairs(
    embedder: PairEmbedder,
    records: Sequence[Record],
    places: Sequence[ReadoutPlace],
    *,
    file: str | os.PathLike[str] | None,
    kind: str = "records",
) -> DrawnPairs:
    """Draw a tenth of the records, at most :data:`MOST_COMPARED`, to compare maps on, and others to fit them on.

    Args:
        embedder: embeds pairs.
        records: at least :data:`FEWEST_RECORDS` that have a pair.
        places: where embeddings may be read.
        file: the records' file, for the error; None for none.
        kind: which records of the file they are.

    Raises:
        UserError: there are too few records, or too few have a pair.
    """
    if len(records) < FEWEST_RECORDS:
        raise UserError(f"has {len(records):,} {kind}; {_NEEDED}", path=file)
    known, held_out = _drawn(embedder, records, file, kind)
    if len(held_out) < FEW_HELD_OUT:
        chosen = f"where embeddings are read is chosen by {counted(len(held_out), 'held-out record')}"
        note(f"{chosen}, which leaves much to chance; of {10 * FEW_HELD_OUT} records {FEW_HELD_OUT} are held out")
    return DrawnPairs(embedder, records, embedder.at(known, places), embedder.at(held_out, places), held_out)


def fit_map(drawn: DrawnPairs) -> FittedMap:
    """Fit a linear map on all pairs of some records, with the place and the fit that are best for held-out ones.

    Those of all layers at once are left to projection heads: a matrix for each side would be as large as their square.
    Records without a pair are noted.
    """
    held_out = {place: pairs for place, pairs in drawn.held_out.items() if place.layer != ALL_LAYERS}
    place, fit = choose_readout(drawn.known, held_out, drawn.embedder.reader.config)
    pairs = drawn.embedder.at(drawn.records, [place])[place]
    _tell_without_pair(pairs, "the linear map")
    (linear_map,) = fit_linear_maps(pairs.source, pairs.target, [fit])
    return FittedMap(linear_map, place, fit, len({*pairs.record.tolist()}), tuple(system_prompts(drawn.records)))


def _tell_without_pair(pairs: ViewEmbeddings, fitted: str) -> None:
    """Print a note of the records that a map is not fitted on, if there are any."""
    if pairs.without_pair is not None:
        note(f"not used for {fitted}: {pairs.without_pair}")


def train_heads(drawn: DrawnPairs) -> FittedHeads:
    """Train projection heads on the pairs of all records that are not held out.

    Everything is chosen by the mean reciprocal rank of the held-out pairs: the :data:`FINALISTS` places with the best
    heads of a short training on the known pairs, of these the place with the best heads of all records, and the epochs.
    Records without a pair are noted.
    """
    others = _others(drawn)
    places = [place for place in drawn.held_out if _has_room(drawn.held_out[place], len(others), place)]
    if len(places) > FINALISTS:
        ranks = {place: _tried(drawn, place) for place in tqdm(places, "projection heads, readouts", disable=None)}
        places = sorted(places, key=lambda place: -ranks[place])[:FINALISTS]
    known = drawn.embedder.at(others, places)
    fitted = {place: _fitted(drawn, place, pairs, progress=True) for place, pairs in known.items()}
    place = max(places, key=lambda each: fitted[each][0])
    _tell_without_pair(known[place], "the projection heads")
    return FittedHeads(
        fitted[place][1], place, len({*known[place].record.tolist()}), tuple(system_prompts(drawn.records))
    )


def _has_room(pairs: ViewEmbeddings, records: int, place: ReadoutPlace) -> bool:
    """Return whether the pairs of so many records at a place are small enough to be kept; note it if they are not."""
    if place.layer != ALL_LAYERS:
        return True
    size = records * (pairs.source[:1].nbytes + pairs.target[:1].nbytes)
    if size > MOST_BYTES:
        gigabytes = f"{size / 1e9:,.1f} GB for {counted(records, 'record')}, more than {MOST_BYTES / 1e9:,.0f}"
        note(f"projection heads: all layers at once are not tried, since their embeddings take {gigabytes}")
    return size <= MOST_BYTES


def _others(drawn: DrawnPairs) -> Sequence[Record]:
    """Return the records that are not held out, without questions of those that are."""
    held_out = {id(record) for record in drawn.held_out_records}
    return apart_from(drawn.held_out_records, [record for record in drawn.records if id(record) not in held_out])


def _tried(drawn: DrawnPairs, place: ReadoutPlace) -> float:
    """Return the rank of held-out pairs behind heads of a short training."""
    return _fitted(drawn, place, drawn.known[place], STEPS_TRIED)[0]


def _fitted(
    drawn: DrawnPairs, place: ReadoutPlace, pairs: ViewEmbeddings, steps: int | None = None, *, progress: bool = False
) -> tuple[float, ProjectionHeads]:
    """Train heads on some pairs, for so many steps or to the end; return the rank of held-out pairs, and the heads."""
    config, held_out = drawn.embedder.reader.config, drawn.held_out[place]
    names = [None] * (int(held_out.record.max()) + 1)

    def rank(heads: ProjectionHeads) -> float:
        return rank_targets(pairs_behind(heads, held_out), names, config).means()["mrr"]

    epochs = epochs_of(len(pairs.source), steps)
    return fit_heads(pairs.source, pairs.target, pairs.same_target, rank, epochs=epochs, progress=progress)


def _drawn(
    embedder: PairEmbedder, records: Sequence[Record], file: str | os.PathLike[str] | None, kind: str
) -> tuple[Sequence[Record], Sequence[Record]]:
    """Draw records that maps are fitted on, and records that compare them: all with a pair, no question in both.

    A map that knows a question finds one of its answers, however little it has learnt of others.
    """
    count = min(MOST_COMPARED, len(records) // 10)
    # The file may be sorted.
    drawn = random.Random(0).sample(records, min(count + MOST_COMPARED, len(records)))
    embedder.tokenizer.count_anew()
    tokenized = embedder.tokenizer.tokenize_each(drawn)
    usable = [
        record for record, tokens in zip(drawn, tokenized, strict=True) if tokens is not None and tokens.all_pairs
    ]
    if len(usable) < FEWEST_RECORDS:
        why = embedder.tokenizer.without_pair
        limit = f"within max_length {embedder.reader.config.max_length}{f' ({why})' if why else ''}"
        fault = f"has {len(usable):,} {kind} with a pair {limit}, of {len(drawn):,}"
        raise UserError(f"{fault}; {_NEEDED}", path=file)
    count = len(usable) * count // len(drawn)
    known, held_out = usable[count:], usable[:count]
    return apart_from(held_out, known), held_out


def apart_from(held_out: Sequence[Record], known: Sequence[Record]) -> Sequence[Record]:
    """Return the known records whose question is not among the held-out ones; all where that leaves too few.

    Where all records have a few questions, every map knows them.
    """
    apart = not_in_test(known, held_out)
    return apart if len(apart) >= FEWEST_RECORDS // 2 else known
