"""Records of a micro-batch to tensors: laid out as sequences, packed into rows, with what is trained and read."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from stepjepa.base.errors import UserError
from stepjepa.batch.layouts import LAYOUTS, Reading
from stepjepa.batch.micro_batch import Batch, Members
from stepjepa.batch.pack import Rows, pack_passes
from stepjepa.batch.sequences import Ids, Item, Numbers, Sequence, main_sequence

Encoding = Literal["tree", "rows"]
"""``tree``: rows of prefix trees under a mask. ``rows``: one plain row for each sequence."""


@dataclass(frozen=True)
class Collator:
    """Makes the micro-batch of some records."""

    layout: str  # name in ``layouts.LAYOUTS``
    predictors: Ids  # [K] ids of the predictor tokens
    reading: Reading = field(default_factory=Reading)  # how embeddings are read
    encoding: Encoding = "tree"
    row_length: int = 512  # most tokens of a row of trees
    attention_length: int | None = None  # run a micro-batch in several passes, see ``pack.pack_passes``
    share_prefixes: bool = True  # over the whole micro-batch, not only within a record
    prompt_labels: bool = False  # also label the tokens of the prompt
    positions: int | None = None  # most tokens of a sequence that the model has positions for
    pad_id: int = 0  # any token does, since nothing sees padding and it has no labels

    @classmethod
    def of(cls, config: Any, predictors: Many[int], **options: Any) -> Collator:
        """The collator of a ``JepaConfig``, with the ids of its predictor tokens; ``options`` are the other fields."""
        reading = Reading(config.front_pred, config.reverse_pred, config.last_token, config.pooling == "mean")
        return cls(config.layout, np.asarray(predictors, np.int32), reading, **options)

    def sequences(self, item: Item) -> list[Sequence]:
        """What a record becomes; ValueError if a sequence is longer than the model has positions."""
        if item.with_views:
            try:
                found = LAYOUTS[self.layout].place(item.record, self.predictors, self.reading)
            except UserError as error:
                raise UserError(f"{error} (line {item.record.line})") from None
        else:
            found = [main_sequence(item.record)]
        longest = max(map(len, found))
        if self.positions is not None and longest > self.positions:
            told = f"expected sequences of at most {self.positions} tokens (max_position_embeddings), got {longest}"
            raise ValueError(f"{told} in line {item.record.line}; set max_length to {self.positions} or less")
        return found

    def __call__(self, items: Iterable[Item | None]) -> Batch:
        """Collate; None stands for a place that an uneven last batch leaves empty."""
        present = [item for item in items if item is not None]
        parts = [self.sequences(item) for item in present]
        sequences = [sequence for part in parts for sequence in part]
        owners = [number for number, part in enumerate(parts) for _ in part]
        passes = pack_passes(
            sequences,
            row_length=self.row_length,
            attention_length=self.attention_length,
            groups=None if self.share_prefixes else owners,
            one_each=self.encoding != "tree",
            pad_id=self.pad_id,
        )
        paths = passes[0].paths
        batch, *further = map(_inputs, passes)
        batch |= self._labels(sequences, paths) | _readouts(owners, sequences, paths)
        if further:
            batch["further"] = further
        batch["num_tokens"] = torch.tensor([sum(int(rows.lengths.sum()) for rows in passes)])
        batch["num_records"] = torch.tensor([len(present), sum(not item.record.pairs for item in present)])
        texts = [(each, path) for each, path in zip(sequences, paths, strict=True) if len(each.text)]
        none = np.zeros(0, bool)
        batch["members"] = Members(
            tuple(item.record.line for item in present),
            tuple(sum(map(len, part)) for part in parts),
            tuple(item.draw for item in present),
            tuple(path[each.text] for each, path in texts),
            tuple(np.flatnonzero(none if each.start is None else each.start[each.text] > 0) for each, _ in texts),
            labels=tuple(item.record.labels for item in present),
            prompt=tuple(item.record.prompt for item in present),
            plain_tokens=sum(len(item.record.ids) for item in present),
        )
        return batch

    def _labels(self, sequences: Many[Sequence], paths: Many[Numbers]) -> Batch:
        """The positions that predict a token, each once, and the tokens that they must predict."""
        rows, ids = [], []
        for kind in ("labels", "prompt"):
            tables = [getattr(each, kind) for each in sequences if kind == "labels" or self.prompt_labels]
            places = [path[table[:, 0]] for path, table in zip(paths, tables, strict=False)]
            rows.append(np.concatenate([np.empty(0, np.int64), *places]))
            ids.append(np.concatenate([np.empty(0, np.int64), *(table[:, 1] for table in tables)]))
        head_index, row = np.unique(np.concatenate(rows), return_inverse=True)
        label_row, prompt_row = row[: len(rows[0])], row[len(rows[0]) :]
        return _tensors(
            head_index=head_index, label_row=label_row, label_ids=ids[0], prompt_row=prompt_row, prompt_ids=ids[1]
        )


def _readouts(owners: Many[int], sequences: Many[Sequence], paths: Many[Numbers]) -> Batch:
    """Where the embeddings of all pairs are read, in the order of records and pairs."""
    found = {}
    for kind in ("source", "target"):
        places = {
            (owner, readout.pair): path[readout.start : readout.end]
            for owner, sequence, path in zip(owners, sequences, paths, strict=True)
            for readout in sequence.readouts
            if readout.kind == kind
        }
        tokens = [places[key] for key in sorted(places)]
        found[f"{kind}_index"] = np.array([each[-1] for each in tokens], np.int64)
        if any(len(each) > 1 for each in tokens):
            found[f"{kind}_tokens"] = np.concatenate(tokens)
            found[f"{kind}_pair"] = np.repeat(np.arange(len(tokens)), [len(each) for each in tokens])
    return _tensors(**found)


def _inputs(rows: Rows) -> Batch:
    """What a model is called with."""
    batch = _tensors(input_ids=rows.ids, attention_mask=np.ones_like(rows.ids))
    if rows.branches:
        batch |= _tensors(position_ids=rows.positions, start=rows.start, end=rows.end)
        batch["isolates"] = bool(rows.start.any())
    return batch


def _tensors(**arrays: np.ndarray) -> Batch:
    return Batch({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})
