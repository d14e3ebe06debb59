"""Forests to batch tensors, in either encoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepjepa.forests.forest import IGNORE, Forest, path
from stepjepa.forests.masks import Visibility, batch_visibility

VISIBILITY_KEYS = ("segment_ids", "offsets", "seen_lengths")


@dataclass(frozen=True)
class Members:
    """The records of a batch, in the order of their rows. No tensor, so that no device is sent it or asked for it.

    Attributes:
        lines: of each in its file, counted from 1.
        lengths: tokens of each, views included.
    """

    lines: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, forests: Iterable[Forest]) -> Members:
        """Those of some forests."""
        found = [(forest.line, len(forest)) for forest in forests]
        return cls(tuple(line for line, _ in found), tuple(length for _, length in found))


class Batch(TypedDict):
    """What ``grouping.GroupCollator`` makes of some records.

    Attributes:
        groups: one for each forward pass, as :class:`ForestCollator` makes them.
        members: whose they are.
    """

    groups: list[dict[str, Tensor]]
    members: Members


@dataclass(frozen=True)
class ForestCollator:
    """Makes one batch of some forests.

    Args:
        pad_id: token id of padding; any id does, since nothing sees padding and it has no labels.
        encoding: ``forest`` (one row per record) or ``rows`` (every view in a plain row of its own).

    The batch holds, with R rows of T tokens, N labelled positions and P pairs:

    * ``input_ids`` ``[R, T]``, ``attention_mask`` ``[R, T]`` all ones: padding stands on the right, where no causal
      token sees it, and an all-ones mask lets attention run without any mask tensor;
    * ``label_index`` ``[N]``: flat positions (row * T + column) that predict a token, ``label_ids`` ``[N]``: which;
    * ``source_index``, ``target_index`` ``[P]``: flat positions of the readouts; only where more than one token is
      averaged: ``source_pooled``, ``target_pooled`` ``[P]``, how many, those up to and including that position;
    * ``triple_index`` ``[S, 3]``: flat positions of the records' triples, for Semantic Tube Prediction;
    * ``num_tokens`` ``[1]``: tokens without padding; ``num_records`` ``[2]``: records, and those without a pair;
    * only where a row is more than plain causal text: ``position_ids`` ``[R, T]`` and the visibility (see
      ``masks.Visibility``).
    """

    pad_id: int
    encoding: str = "forest"

    def __call__(self, forests: Sequence[Forest | None]) -> dict[str, Tensor]:
        """Collate.

        Args:
            forests: None stands for a place that an uneven last batch leaves empty.
        """
        present = [forest for forest in forests if forest is not None]
        if self.encoding == "rows":
            return self._rows(present)
        batch = self._pad([forest.input_ids for forest in present])
        length = batch["input_ids"].shape[1]
        starts = [row * length for row in range(len(present))]
        self._finish(
            batch,
            present,
            labels=[(start, forest.shift_labels) for start, forest in zip(starts, present, strict=True)],
            pairs=[forest.pairs + start for start, forest in zip(starts, present, strict=True)],
            triples=[
                tuple(start + place for place in forest.triple)
                for start, forest in zip(starts, present, strict=True)
                if forest.triple is not None
            ],
        )
        if any(not forest.is_plain for forest in present):
            visibility = batch_visibility(present, length)
            batch.update(zip(VISIBILITY_KEYS, visibility[:3], strict=True))
            batch["position_ids"] = visibility.position_ids
        return batch

    def _rows(self, forests: Sequence[Forest]) -> dict[str, Tensor]:
        rows: list[NDArray[np.int32]] = []
        places: list[NDArray[np.int32]] = []
        labels: list[tuple[int, NDArray[np.int32]]] = []
        triples: list[NDArray[np.int32]] = []
        for forest in forests:
            # Where each token of the forest is read: a branch at the end of its path's row, the main text in its own.
            row_of = np.zeros(len(forest), np.int32)
            column_of = np.zeros(len(forest), np.int32)
            for index, segment in enumerate(forest.segments):
                indices = path(forest, index)
                row_of[segment.start : segment.end] = len(rows)
                column_of[segment.start : segment.end] = np.arange(len(indices) - len(segment), len(indices))
                if index == 0:
                    labels.append((len(rows), forest.shift_labels[indices]))
                rows.append(forest.input_ids[indices])
            for pair in forest.pairs:
                places.append(np.stack([row_of[pair], column_of[pair]], axis=1))
            if forest.triple is not None:
                triples.append(np.stack([row_of[list(forest.triple)], column_of[list(forest.triple)]], axis=1))
        batch = self._pad(rows)
        length = batch["input_ids"].shape[1]
        self._finish(
            batch,
            forests,
            labels=[(row * length, values) for row, values in labels],
            pairs=[(place[:, 0] * length + place[:, 1])[None] for place in places],
            triples=[tuple(place[:, 0] * length + place[:, 1]) for place in triples],
        )
        return batch

    def _pad(self, rows: Sequence[NDArray[np.int32]]) -> dict[str, Tensor]:
        length = max((len(row) for row in rows), default=1)
        ids = np.full((max(len(rows), 1), length), self.pad_id, np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.ones(ids.shape, dtype=torch.long),
            "num_tokens": torch.tensor([sum(len(row) for row in rows)]),
        }

    def _finish(
        self,
        batch: dict[str, Tensor],
        forests: Sequence[Forest],
        labels: Sequence[tuple[int, NDArray[np.int32]]],
        pairs: Sequence[NDArray[np.int32]],
        triples: Sequence[tuple[int, ...]],
    ) -> None:
        index = [np.flatnonzero(values != IGNORE) for _, values in labels]
        flat = [start + place for (start, _), place in zip(labels, index, strict=True)]
        ids = [values[place] for (_, values), place in zip(labels, index, strict=True)]
        batch["label_index"] = _join(flat)
        batch["label_ids"] = _join(ids)
        both = np.concatenate([np.empty((0, 2), np.int64), *pairs]).astype(np.int64)
        batch["source_index"] = torch.from_numpy(both[:, 0].copy())
        batch["target_index"] = torch.from_numpy(both[:, 1].copy())
        pooled = np.concatenate(
            [
                np.ones((0, 2), np.int64),
                *(np.ones((len(f.pairs), 2)) if f.pooled is None else f.pooled for f in forests),
            ]
        )
        if (pooled > 1).any():
            batch["source_pooled"] = torch.from_numpy(pooled[:, 0].astype(np.int64))
            batch["target_pooled"] = torch.from_numpy(pooled[:, 1].astype(np.int64))
        batch["triple_index"] = torch.from_numpy(np.asarray(triples, np.int64).reshape(-1, 3))
        batch["num_records"] = torch.tensor([len(forests), sum(not len(forest.pairs) for forest in forests)])


def _join(arrays: Sequence[NDArray[np.signedinteger]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64))


def visibility_of(batch: dict[str, Tensor]) -> Visibility | None:
    """The visibility that a batch carries, or None if its rows are plain causal text."""
    if "segment_ids" not in batch:
        return None
    return Visibility(*(batch[key] for key in (*VISIBILITY_KEYS, "position_ids")))
