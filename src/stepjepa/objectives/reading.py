"""Read the embeddings of views off a model, from the sequences that training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from stepjepa.base.errors import UserError, naming_batch_size
from stepjepa.base.json_object import JsonObject
from stepjepa.batch.collate import Collator, Encoding, Packing
from stepjepa.batch.sequences import Kind, SampledRecord, TokenizedRecord, TokenSequence
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.layouts import changes_text
from stepjepa.data.records import Record
from stepjepa.models.architecture import base_model, evaluating
from stepjepa.models.encode import encode
from stepjepa.models.encoded import Encoded, pool_readouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIDES: tuple[Kind, ...] = ("source", "target")
"""The two views of a pair: the source predicts the target."""

# Settings that say which text a view is, and those that say where the embedding of a view is read.
_TEXT = ("step_separator", "max_length", "labels")
_READOUT = ("layout", "predictors", "pairs", "front_pred", "reverse_pred", "last_token", "pair_distance", "pooling")


def reading_config(trained: JsonObject | None, views: str) -> JepaConfig:
    """The settings by which the views of a model are read, whose records without a usable pair are skipped.

    A model trained on these views is read where it was trained to be read; any other, ``regular`` runs among them, at
    the end of the source view, with no predictor token, which it has never seen.

    Args:
        trained: the ``JepaConfig`` of training as a dict, see ``store.record.trained_objective``; None if not known.
        views: ``llm-jepa`` or ``step-jepa``.
    """
    settings: JsonObject = {"over_length": "skip", "mode": views, "predictors": 0}
    if trained is not None:
        names = [*_TEXT, *_READOUT, "jepa_layer"] if trained["mode"] == views else [*_TEXT]
        # Runs of earlier versions do not record all of them.
        settings |= {name: trained[name] for name in names if name in trained}
        if trained.get("plain"):
            # Also where the user's text alone was trained on: the answer is a view of its own.
            settings |= {"plain": True, "labels": "assistant"}
        if changes_text(settings.get("layout", "branched")):
            # The same views, in a main sequence without predictor tokens and isolated steps.
            settings["layout"] = "branched"
    return JepaConfig(**settings)


@dataclass(frozen=True)
class ViewEmbeddings:
    """The embeddings of all P pairs of some records, in the records' order."""

    source: NDArray[np.float32]  # [P, D]
    target: NDArray[np.float32]  # [P, D]
    record: NDArray[np.int64]  # [P], index of the record that a pair is of
    pair: NDArray[np.int64]  # [P], number of the pair in its record, from 1; for Step-JEPA that of the source step


@dataclass(frozen=True)
class _ViewCollator(Collator):
    """Collates only the sequences in which an embedding of one of ``sides`` is read."""

    sides: tuple[Kind, ...] = SIDES

    def sequences(self, sample: SampledRecord) -> list[TokenSequence]:
        return [each for each in super().sequences(sample) if any(part.kind in self.sides for part in each.readouts)]


@dataclass(frozen=True)
class ViewReader:
    """Embeds the views of tokenised records by a model that is set up for trees, see ``setup.set_up_attention``.

    A predictor head is not applied: it is no part of the encoder, and inference never needs it.
    """

    model: PreTrainedModel
    config: JepaConfig  # by which the records are tokenised, from :func:`reading_config`
    predictors: Sequence[int]  # [K] ids of the predictor tokens
    encoding: Encoding
    packing: Packing
    batch_size: int = 16  # records at a time

    def pairs(self, records: Sequence[Record], tokenized: Sequence[TokenizedRecord | None]) -> ViewEmbeddings:
        """Both embeddings of all pairs of some records; UserError if none of them has a pair."""
        embeddings = self._embed(tokenized, SIDES)
        if not embeddings:
            config = self.config
            views = f"{config.mode} views (step_separator {config.step_separator!r}, max_length {config.max_length})"
            path = records[0].path if records else None
            raise UserError(f"none of {len(records)} records has a pair of {views}", path=path)
        joined = np.concatenate([*embeddings.values()])  # [P, 2, D]
        places = [(index, number + 1) for index, value in embeddings.items() for number in range(len(value))]
        return ViewEmbeddings(joined[:, 0], joined[:, 1], *np.asarray(places).T)

    def side(
        self, records: Sequence[Record], tokenized: Sequence[TokenizedRecord | None], side: Kind
    ) -> NDArray[np.float32]:
        """``[N, D]``: one view of the first pair of each of N records, in their order; UserError if one has none."""
        embeddings = self._embed(tokenized, (side,))
        for index, record in enumerate(records):
            if index not in embeddings:
                lacking = "two reasoning steps" if self.config.mode == "step-jepa" else "two views with text"
                limit = f"within max_length {self.config.max_length}, so no {side} view to embed; leave it out"
                raise UserError(f"the record has no {lacking} {limit}", path=record.path, line=record.line)
        width = base_model(self.model).config.get_text_config().hidden_size
        rows = [embeddings[index][0, 0] for index in range(len(records))]
        return np.stack(rows) if rows else np.empty((0, width), np.float32)

    def _embed(
        self, tokenized: Sequence[TokenizedRecord | None], sides: tuple[Kind, ...]
    ) -> dict[int, NDArray[np.float32]]:
        """Index of a record, ascending, to the embeddings ``[pairs, sides, D]`` of its pairs; without one it has none.

        UserError if an embedding is not finite.
        """
        samples = {
            index: SampledRecord(each) for index, each in enumerate(tokenized) if each is not None and each.all_pairs
        }
        collator = _ViewCollator.of(self.config, self.predictors, encoding=self.encoding, **self.packing)
        collator = replace(collator, sides=sides)

        def views(encoded: Encoded) -> dict[str, Tensor]:
            states = encoded.states[encoded.layer]
            embeddings = [pool_readouts(states, encoded.batch, side) for side in sides]
            return {"views": torch.stack(embeddings, 1)}  # [P, sides, D]

        # Long ones first, so that memory problems show at once; like lengths together, so that there is little padding.
        order = sorted(samples, key=lambda index: -len(samples[index].record.ids))
        embeddings: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad(), evaluating(self.model), naming_batch_size(self.batch_size):
            starts = tqdm(range(0, len(order), self.batch_size), f"embed, {self.batch_size} at a time", disable=None)
            for start in starts:
                part = order[start : start + self.batch_size]
                batch = collator(samples[index] for index in part).to(self.model.device)
                states = encode(self.model, batch, views, layer=self.config.jepa_layer)["views"]
                values = states.float().cpu().split([len(samples[index].record.all_pairs) for index in part])
                embeddings.update(zip(part, (value.numpy() for value in values), strict=True))
        if not all(np.isfinite(each).all() for each in embeddings.values()):
            raise UserError("some embeddings are not finite; the model's numbers overflow: try `dtype float32`")
        return {index: embeddings[index] for index in samples}
