"""Compute the embeddings of views, from the same sequences as in training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from stepjepa.base.arguments import check_number
from stepjepa.base.errors import UserError, naming_batch_size
from stepjepa.base.json_object import JsonObject
from stepjepa.batch.collate import Collator, Encoding, Packing
from stepjepa.config.batch_sizes import EMBEDDED
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.models.architecture import evaluating, hidden_size, number_of_layers
from stepjepa.models.encode import encode
from stepjepa.models.encoded import Encoded, pool_readouts
from stepjepa.models.first_layers import running_up_to
from stepjepa.objectives.view_embeddings import ALL_LAYERS, ReadoutPlace, SideEmbeddings, ViewEmbeddings
from stepjepa.views.layouts import changes_text
from stepjepa.views.sequences import Kind, Numbers, Readout, SampledRecord, TokenizedRecord, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIDES: tuple[Kind, ...] = ("source", "target")
"""The two views of a pair: the source predicts the target."""

WORTH_SHARING = 16
"""Least number of shared first tokens for which two sequences are put into one tree."""

# Settings that determine the text of any view, and those that a model has for the views that it was trained on.
_TEXT = ("step_separator", "max_length", "labels")
_OF_VIEWS = (
    *("layout", "predictors", "pairs", "front_pred", "reverse_pred", "last_token", "pair_distance", "pooling"),
    *("steps_from", "jepa_layer"),
)


def reading_config(trained: JsonObject | None, views: str) -> JepaConfig:
    """Return the settings for reading the views of a model; records without a usable pair are skipped.

    A model trained on these views is read at the readouts of its training. Any other model, such as that of a
    ``regular`` run, is read at the end of each view, without predictor tokens, which it has never seen.

    Args:
        trained: the ``JepaConfig`` of training as a dict, see ``store.record.trained_objective``; None if not known.
        views: ``llm-jepa`` or ``step-jepa``.
    """
    settings: JsonObject = {"over_length": "skip", "mode": views, "predictors": 0}
    if trained is not None:
        names = [*_TEXT, *_OF_VIEWS] if trained["mode"] == views else [*_TEXT]
        # Records of earlier versions lack some of them.
        settings |= {name: trained[name] for name in names if name in trained}
        if trained.get("plain"):
            # Even if the labels were those of the user's text alone, the answer is a view.
            settings |= {"plain": True, "labels": "assistant"}
        if changes_text(settings.get("layout", "branched")):
            # 'branched' has the same views, with a main sequence without predictor tokens and isolated steps.
            settings["layout"] = "branched"
    return JepaConfig(**settings)


def has_objective(trained: JsonObject | None) -> bool:
    """Return whether the ``JepaConfig`` that a model was trained with, if any, says where its embeddings are read."""
    return trained is not None and trained["mode"] != "regular"


def embedding_config(
    trained: JsonObject | None,
    *,
    layer: int | None = None,
    pooling: str | None = None,
    path: str | os.PathLike[str] | None = None,
) -> JepaConfig:
    """Return the settings for reading a model's embeddings: those of its training, unless a readout is named.

    A model without a JEPA objective is read on the views of LLM-JEPA, at the readout that is named.

    Args:
        trained: as for :func:`reading_config`.
        layer: index in transformers' ``hidden_states``, instead of the layer of training.
        pooling: ``last`` or ``mean``, instead of that of training; ``mean`` also replaces its ``last_token``.
        path: the model's folder, for the error.

    Raises:
        UserError: the model has no JEPA objective, and neither ``layer`` nor ``pooling`` is named.
        ValueError: a value is not allowed.
        TypeError: ``layer`` is no whole number.
    """
    views = str(trained["mode"]) if trained is not None and has_objective(trained) else None
    if views is None and layer is None and pooling is None:
        raise UserError(
            "the model has no JEPA objective, which would say where its embeddings are read; pass `pooling mean` (the "
            "mean of a text's last hidden states), `pooling last`, or a `layer`",
            path=path,
        )
    if layer is not None:
        check_number("layer", layer, least=None)
    changes: JsonObject = {} if layer is None else {"jepa_layer": layer}
    if pooling is not None:
        changes |= {"pooling": pooling, "last_token": None} if pooling == "mean" else {"pooling": pooling}
    return changed_readout(reading_config(trained, views or "llm-jepa"), changes)


def changed_readout(config: JepaConfig, changes: JsonObject) -> JepaConfig:
    """Return settings with changes, ``jepa_layer`` among them, that are called ``layer`` where a user names them.

    ValueError for the input embeddings where a predictor token is read.
    """
    if changes.get("jepa_layer") == 0 and config.predictors and not config.front_pred:
        fault = "that is the embedding of a predictor token, always the same"
        raise ValueError(f"layer: expected -1, or 1 or more, got 0; {fault}")
    return replace(config, **changes)


def without_predictors(config: JepaConfig, pooling: Literal["last", "mean"]) -> JepaConfig:
    """Return the settings for reading the same views at their ends, or as means, without predictor tokens."""
    return replace(config, predictors=0, front_pred=False, last_token=None, pooling=pooling)


def at_place(config: JepaConfig, place: ReadoutPlace) -> JepaConfig:
    """Return settings changed so that embeddings are read at a place; of all layers they name the last one."""
    if not place.predictors:
        config = without_predictors(config, place.pooling)
    return replace(config, jepa_layer=-1 if place.layer == ALL_LAYERS else place.layer, pooling=place.pooling)


@dataclass(frozen=True)
class _ReadoutCollator(Collator):
    """Collates sequences that are laid out already; the index in ``SampledRecord.rng_key`` selects one."""

    laid_out: Sequence[TokenSequence] = ()

    def sequences(self, sample: SampledRecord) -> list[TokenSequence]:
        return [self.laid_out[sample.rng_key[1]]]


class _DistinctReadouts:
    """Sequences with one readout each, equal ones once.

    Attributes:
        laid_out: the sequences; every readout is labelled a source, also those of targets.
    """

    def __init__(self) -> None:
        self.laid_out: list[TokenSequence] = []
        self._numbers: dict[tuple[bytes, bytes, int, int], int] = {}

    def number(self, sequence: TokenSequence, readout: Readout) -> int:
        """Return the index of a sequence with one of its readouts; it is added if it is new."""
        visible = b"" if sequence.start is None else sequence.start.tobytes()
        key = (sequence.ids.tobytes(), visible, readout.start, readout.end)
        number = self._numbers.setdefault(key, len(self.laid_out))
        if number == len(self.laid_out):
            alone = Readout(0, "source", readout.start, readout.end)
            self.laid_out.append(TokenSequence(sequence.ids, start=sequence.start, readouts=(alone,)))
        return number


@dataclass(frozen=True)
class ViewReader:
    """Embeds the views of tokenised records by a model that is set up for trees, see ``setup.set_up_attention``.

    Equal sequences are run once. A predictor head is not applied: it is not a part of the encoder.
    """

    model: PreTrainedModel
    config: JepaConfig  # settings by which the records are tokenised, from :func:`reading_config`
    predictors: Sequence[int]  # [K] ids of the predictor tokens
    encoding: Encoding
    packing: Packing
    batch_size: int = EMBEDDED  # sequences at a time

    def __post_init__(self) -> None:
        check_number("batch_size", self.batch_size)

    @property
    def place(self) -> ReadoutPlace:
        """Where the settings read embeddings."""
        return ReadoutPlace(self.config.jepa_layer, self.config.pooling)

    def pairs_at(
        self, records: Sequence[Record], tokenized: Sequence[TokenizedRecord | None], places: Sequence[ReadoutPlace]
    ) -> dict[ReadoutPlace, ViewEmbeddings]:
        """Embed both views of all pairs at several places in one pass; UserError if no record has a pair.

        Args:
            records: for the error.
            tokenized: the records as tokens; None for one that is left out.
            places: where embeddings are read; ``mean`` among them needs settings with ``pooling='mean'``.
        """
        rows, vectors = self._embed(tokenized, SIDES, places)
        if not rows:
            config = self.config
            views = f"{config.mode} views (step_separator {config.step_separator!r}, max_length {config.max_length})"
            path = records[0].path if records else None
            raise UserError(f"none of {len(records)} records has a pair of {views}", path=path)
        index, step = _rows(rows)
        source, target = np.concatenate([*rows.values()]).T
        # The pairs in the order of the embeddings.
        pairs = [pair for record in tokenized if record is not None for pair in record.all_pairs]
        targets = [pair.first if self.config.reverse_pred else pair.second for pair in pairs]
        first: dict[bytes, int] = {}  # tokens of a target -> index of the first pair that has it
        same_target = np.asarray(
            [first.setdefault(view.content.tobytes(), place) for place, view in enumerate(targets)]
        )
        return {
            place: ViewEmbeddings(at_place[source], at_place[target], index, step, same_target)
            for place, at_place in zip(places, vectors, strict=True)
        }

    def side(self, tokenized: Sequence[TokenizedRecord], side: Kind, place: ReadoutPlace) -> SideEmbeddings:
        """Embed one view of each pair.

        Args:
            tokenized: records as tokens, each with a pair.
            side: the view.
            place: where embeddings are read, of the views that the settings describe.

        Raises:
            UserError: an embedding is not finite.
        """
        places, (vectors,) = self._embed(tokenized, (side,), [place])
        rows = np.concatenate([np.empty((0, 1), np.int64), *places.values()])[:, 0]
        return SideEmbeddings(vectors[rows], *_rows(places))

    def _embed(
        self, tokenized: Sequence[TokenizedRecord | None], sides: tuple[Kind, ...], read_at: Sequence[ReadoutPlace]
    ) -> tuple[dict[int, Numbers], list[NDArray[np.float32]]]:
        """Compute the distinct embeddings ``[U, D]`` at each place, and the indices ``[pairs, sides]`` of each record.

        The indices are by the number of the record, ascending; a record without a pair has none.
        """
        collator = _ReadoutCollator.of(self.config, self.predictors, encoding=self.encoding, **self.packing)
        layout = Collator.of(self.config, self.predictors, encoding=self.encoding, **self.packing)
        distinct = _DistinctReadouts()
        places: dict[int, Numbers] = {}
        for index, record in enumerate(tokenized):
            if record is None or not record.all_pairs:
                continue
            places[index] = np.empty((len(record.all_pairs), len(sides)), np.int64)
            sequences = layout.sequences(SampledRecord(record))
            for sequence in sequences:
                for readout in sequence.readouts:
                    if readout.kind in sides:
                        places[index][readout.pair, sides.index(readout.kind)] = distinct.number(sequence, readout)
        return places, self._states(replace(collator, laid_out=distinct.laid_out), read_at)

    def _states(self, collator: _ReadoutCollator, places: Sequence[ReadoutPlace]) -> list[NDArray[np.float32]]:
        """Compute the embeddings ``[U, D]`` of sequences at each place; UserError if one is not finite."""
        of_place = [place.layers(number_of_layers(self.model)) for place in places]
        poolings = [place.pooling for place, read in zip(places, of_place, strict=True) for _ in read]

        def views(encoded: Encoded) -> dict[str, Tensor]:
            read = zip(layers, poolings, strict=True)
            return {"views": torch.stack([self._pooled(encoded, layer, pooling) for layer, pooling in read])}

        vectors = np.empty((len(poolings), len(collator.laid_out), hidden_size(self.model)), np.float32)
        record = TokenizedRecord(np.empty(0, np.int32), np.empty(0, np.int32))
        trees = collator
        # Plain rows of similar lengths in one pass: short sequences gain more by it than by a shared beginning.
        rows = replace(collator, encoding="rows", one_pass=True)
        with (
            torch.no_grad(),
            evaluating(self.model),
            running_up_to(self.model, [layer for read in of_place for layer in read]) as layers,
            naming_batch_size(self.batch_size),
        ):
            groups = micro_batches(collator.laid_out, self.batch_size)
            for group in tqdm(groups, f"embed, {self.batch_size} at a time", disable=None, leave=None):
                collate = trees if group.shares else rows
                samples = (SampledRecord(record, rng_key=(0, number)) for number in group.indices)
                batch = collate(samples).to(self.model.device)
                states = encode(self.model, batch, views, layer=layers[0], layers=layers)["views"]
                vectors[:, group.indices] = states.float().cpu().numpy()
        if not np.isfinite(vectors).all():
            raise UserError("some embeddings are not finite; the model's numbers overflow: try `dtype float32`")
        ends = [0, *accumulate(len(read) for read in of_place)]
        return [_side_by_side(vectors[start:end]) for start, end in pairwise(ends)]

    def _pooled(self, encoded: Encoded, layer: int, pooling: str) -> Tensor:
        """Return the embeddings ``[R, D]`` of a micro-batch at one place."""
        states = encoded.states[layer]
        if pooling == "last" and self.config.pooling == "mean":
            return states[encoded.batch.readouts("source").last]
        return pool_readouts(states, encoded.batch, "source")


def _side_by_side(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``[U, layers * D]`` of vectors ``[layers, U, D]`` of some layers; those of one layer are not copied."""
    layers, rows, dimensions = vectors.shape
    return vectors.swapaxes(0, 1).reshape((rows, layers * dimensions))


class MicroBatch(NamedTuple):
    """Sequences that are run together."""

    indices: list[int]
    shares: bool  # each shares most of its tokens with another one


def micro_batches(sequences: Sequence[TokenSequence], size: int) -> list[MicroBatch]:
    """Group sequences into micro-batches of ``size``, the longest first.

    Sequences that share most of their tokens are neighbours, so that these are computed once. All others are sorted by
    length, so that there is little padding; long ones come first, so that memory problems show at once.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].ids.tobytes())
    families: list[list[int]] = []
    for place, index in enumerate(order):
        if place and _shares_most(sequences[order[place - 1]], sequences[index]):
            families[-1].append(index)
        else:
            families.append([index])

    def longest(indices: Sequence[int]) -> int:
        return max(len(sequences[index]) for index in indices)

    families.sort(key=longest, reverse=True)
    batches = []
    for shares in (True, False):
        flat = [index for family in families if (len(family) > 1) == shares for index in family]
        batches += [MicroBatch(flat[start : start + size], shares) for start in range(0, len(flat), size)]
    return sorted(batches, key=lambda batch: -longest(batch.indices))


def _shares_most(first: TokenSequence, second: TokenSequence) -> bool:
    """Return whether two sequences share enough first tokens: ``WORTH_SHARING``, and half of the shorter one."""
    size = min(len(first), len(second))
    enough = max(WORTH_SHARING, (size + 1) // 2)
    return enough <= size and np.array_equal(first.ids[:enough], second.ids[:enough])


def _rows(places: Mapping[int, Numbers]) -> tuple[Numbers, Numbers]:
    """Return for each row, a pair of a record, the record's index and the number of the pair, from 1."""
    counts = [len(rows) for rows in places.values()]
    index = np.repeat(np.array([*places], np.int64), counts)
    return index, np.concatenate([np.empty(0, np.int64), *(np.arange(1, count + 1) for count in counts)])
