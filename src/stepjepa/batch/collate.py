"""Collate records into tensors: sequences by the layout, packed into rows, with labels and readouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Self, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.batch.costs import Costs
from stepjepa.batch.mask import Kernel
from stepjepa.batch.micro_batch import Batch, BatchRecords, segment_values
from stepjepa.batch.pack import Rows, pack_passes
from stepjepa.batch.segments import calls, varlen_segments
from stepjepa.config.jepa import JepaConfig
from stepjepa.views.layouts import LAYOUTS, ReadoutOptions
from stepjepa.views.sequences import Ids, Kind, Numbers, SampledRecord, TokenSequence, hash_tokens, main_sequence

Encoding = Literal["tree", "rows"]
"""``tree``: rows of prefix trees under a mask. ``rows``: one plain row for each sequence."""

_SENT_LAYOUT = "sent_layout"
"""Where a pickled collator has the function of its layout."""


class Packing(TypedDict, total=False):
    """Options of packing sequences into rows: the fields of :class:`Collator` that depend on model and device."""

    row_length: int
    pass_length: int | None
    costs: Costs | None
    kernel: Kernel
    one_pass: bool
    share_prefixes: bool
    positions: int | None


@dataclass(frozen=True)
class Collator:
    """Makes a micro-batch from records.

    Attributes:
        layout: a name in ``views.layouts.LAYOUTS``.
        predictors: ``[K]`` ids of the predictor tokens.
        reading: where views are read.
        encoding: as the model runs sequences: ``tree`` or ``rows``.
        row_length: maximum tokens of a row of trees under a mask.
        pass_length: maximum tokens of a pass by segments; None for no limit.
        costs: costs of a layer on a CPU, by which ``pack.pack_passes`` chooses how to run a batch.
        kernel: the form in which the model runs trees.
        one_pass: never cut a micro-batch into several passes.
        share_prefixes: share over the whole micro-batch, not only within a record.
        prompt_labels: also label the tokens of user messages.
        whole_pairs: refuse a pair of which the source or the target alone is read.
        positions: maximum length of a sequence, by the model's positions.
        pad_id: arbitrary: padding is masked and unlabelled.
    """

    layout: str
    predictors: Ids
    reading: ReadoutOptions = field(default_factory=ReadoutOptions)
    encoding: Encoding = "tree"
    row_length: int = 512
    pass_length: int | None = None
    costs: Costs | None = None
    kernel: Kernel = "mask"
    one_pass: bool = False
    share_prefixes: bool = True
    prompt_labels: bool = False
    whole_pairs: bool = False
    positions: int | None = None
    pad_id: int = 0

    @classmethod
    def of(
        cls,
        config: JepaConfig,
        predictors: Sequence[int],
        *,
        encoding: Encoding = "tree",
        prompt_labels: bool = False,
        whole_pairs: bool = False,
        pad_id: int = 0,
        **packing: Unpack[Packing],
    ) -> Self:
        """Make the collator of a configuration.

        Args:
            config: layout and readouts.
            predictors: ids of its predictor tokens, K of them.
            encoding: as the model runs sequences.
            prompt_labels: also label the tokens of user messages.
            whole_pairs: refuse a pair of which the source or the target alone is read: monitors and losses need both.
            pad_id: any token; padding is masked and unlabelled.
            packing: the fields that depend on model and device.
        """
        reading = ReadoutOptions(config.front_pred, config.reverse_pred, config.last_token, config.pooling == "mean")
        ids = np.asarray(predictors, np.int32)
        of_objective = {"prompt_labels": prompt_labels, "whole_pairs": whole_pairs}
        return cls(str(config.layout), ids, reading, encoding, pad_id=pad_id, **of_objective, **packing)

    def __getstate__(self) -> JsonObject:
        """Send the layout along: a worker process that is spawned has not registered a layout of the user's own."""
        return {**vars(self), _SENT_LAYOUT: LAYOUTS[self.layout]}

    def __setstate__(self, state: JsonObject) -> None:
        LAYOUTS.setdefault(state["layout"], state.pop(_SENT_LAYOUT))
        vars(self).update(state)

    def sequences(self, sample: SampledRecord) -> list[TokenSequence]:
        """Return the sequences that the layout makes of one record.

        Raises:
            ValueError: a sequence is longer than the model has positions, or half of a pair is read for whole ones.
            UserError: the layout can't place the views of the record.
        """
        record, sequences = sample.record, list[TokenSequence]()
        for text in record.texts:
            if sample.with_views:
                try:
                    placed = LAYOUTS[self.layout].place(text, self.predictors, self.reading)
                except UserError as error:
                    raise UserError(f"{error} (line {record.line})") from None
                if not placed:
                    raise ValueError(
                        f"layout '{self.layout}': expected a sequence or more, got none (line {record.line})"
                    )
                if self.whole_pairs and (unread := _pairs_read_once(placed)):
                    raise ValueError(
                        f"layout '{self.layout}': expected a source and a target readout of each pair, got one of them "
                        f"for pair {min(unread)} (line {record.line})"
                    )
                sequences += _renumbered(placed, sequences)
            else:
                sequences.append(main_sequence(text))
        longest = max(map(len, sequences))
        if self.positions is not None and longest > self.positions:
            raise ValueError(
                f"expected sequences of at most {self.positions} tokens (max_position_embeddings), got {longest} in "
                f"line {record.line}; set max_length to {self.positions} or less"
            )
        return sequences

    def __call__(self, samples: Iterable[SampledRecord | None]) -> Batch:
        """Make the micro-batch of some records, on the CPU; None is a padding slot of an uneven last batch.

        Raises:
            ValueError, UserError: as for :meth:`sequences`.
        """
        present = [sample for sample in samples if sample is not None]
        by_record = [self.sequences(sample) for sample in present]
        sequences = [sequence for group in by_record for sequence in group]
        owners = [number for number, group in enumerate(by_record) for _ in group]
        passes = pack_passes(
            sequences,
            row_length=self.row_length,
            pass_length=self.pass_length,
            costs=self.costs,
            kernel=self.kernel,
            one_pass=self.one_pass,
            groups=None if self.share_prefixes else owners,
            one_each=self.encoding != "tree",
            pad_id=self.pad_id,
        )
        paths = passes[0].paths
        batch, *further = (_inputs(rows, None if self.kernel == "varlen" else self.costs) for rows in passes)
        batch.update(self._labels(sequences, paths) | _readouts(owners, sequences, paths))
        if further:
            batch["further"] = further
        batch["num_tokens"] = sum(int(rows.lengths.sum()) for rows in passes)
        batch["num_records"] = len(present)
        batch["num_without_pair"] = sum(not sample.record.all_pairs for sample in present)
        batch["records"] = _records(present, by_record, sequences, paths)
        return batch

    def _labels(self, sequences: Sequence[TokenSequence], paths: Sequence[Numbers]) -> Batch:
        """Return the tensors of labels and, if ``prompt_labels``, of prompt labels; else those are empty."""
        prompt_tables = [sequence.prompt if self.prompt_labels else sequence.prompt[:0] for sequence in sequences]
        labels = _predictions([sequence.labels for sequence in sequences], paths)
        prompt = _predictions(prompt_tables, paths)
        return _tensors(
            head_index=labels.positions,
            label_row=labels.row,
            label_ids=labels.ids,
            prompt_index=prompt.positions,
            prompt_row=prompt.row,
            prompt_ids=prompt.ids,
        )


class _Predictions(NamedTuple):
    """Tokens to predict, and the positions that predict them; a position may predict several."""

    positions: Numbers  # [U] distinct flat positions, ascending
    row: Numbers  # [N] index into ``positions`` of the position that predicts each token
    ids: Numbers  # [N] the tokens


def _predictions(tables: Sequence[Ids], paths: Sequence[Numbers]) -> _Predictions:
    """Join the labels of sequences.

    Args:
        tables: ``[L, 2]`` for each sequence: position in it, and the token to predict there.
        paths: flat positions of the tokens of each sequence.
    """
    places = [path[table[:, 0]] for path, table in zip(paths, tables, strict=True)]
    index, row = np.unique(_joined(places), return_inverse=True)
    return _Predictions(index, row, _joined([table[:, 1] for table in tables]))


def _joined(parts: Sequence[NDArray[np.integer]]) -> Numbers:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _pairs_read_once(sequences: Sequence[TokenSequence]) -> set[int]:
    """Return the pairs of which the source or the target alone is read."""
    source, target = (
        {readout.pair for sequence in sequences for readout in sequence.readouts if readout.kind == kind}
        for kind in ("source", "target")
    )
    return source ^ target


def _renumbered(sequences: Sequence[TokenSequence], before: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
    """Number the pairs of a further text of a record after those of the texts ``before``."""
    first = max((readout.pair + 1 for sequence in before for readout in sequence.readouts), default=0)
    if not first:
        return sequences
    return [
        replace(sequence, readouts=tuple(readout._replace(pair=first + readout.pair) for readout in sequence.readouts))
        for sequence in sequences
    ]


def _readouts(owners: Sequence[int], sequences: Sequence[TokenSequence], paths: Sequence[Numbers]) -> Batch:
    """Return the tensors of the readouts of all pairs, in the order of records and pairs."""
    batch = Batch()
    kinds: tuple[Kind, ...] = ("source", "target")
    for kind in kinds:
        by_pair = {
            (owner, readout.pair): (path[readout.start : readout.end], _hash_of_visible(sequence, readout.end))
            for owner, sequence, path in zip(owners, sequences, paths, strict=True)
            for readout in sequence.readouts
            if readout.kind == kind
        }
        in_order = [by_pair[key] for key in sorted(by_pair)]
        tokens = [positions for positions, _ in in_order]
        hashes = np.array([digest for _, digest in in_order], np.int64)
        last = np.array([positions[-1] for positions in tokens], np.int64)
        batch |= _tensors(**{f"{kind}_index": last, f"{kind}_key": hashes})
        if any(len(positions) > 1 for positions in tokens):
            pair = np.repeat(np.arange(len(tokens)), [len(positions) for positions in tokens])
            batch |= _tensors(**{f"{kind}_tokens": np.concatenate(tokens), f"{kind}_pair": pair})
    return batch


def _hash_of_visible(sequence: TokenSequence, end: int) -> int:
    """Hash the tokens that token ``end - 1`` of a sequence sees, itself included, to a signed 64-bit integer."""
    start = 0 if sequence.start is None else int(sequence.start[end - 1])
    return hash_tokens(sequence.ids[start:end])


def _records(
    samples: Sequence[SampledRecord],
    by_record: Sequence[Sequence[TokenSequence]],
    sequences: Sequence[TokenSequence],
    paths: Sequence[Numbers],
) -> BatchRecords:
    """Collect the facts about each record; ``paths`` holds the flat position of each token of each sequence."""
    main = [(sequence, path) for sequence, path in zip(sequences, paths, strict=True) if len(sequence.text)]
    starts = [np.zeros(0) if sequence.start is None else sequence.start[sequence.text] for sequence, _ in main]
    return BatchRecords(
        lines=tuple(sample.record.line for sample in samples),
        lengths=tuple(sum(map(len, group)) for group in by_record),
        rng_keys=tuple(sample.rng_key for sample in samples for _ in sample.record.texts),
        paths=tuple(path[sequence.text] for sequence, path in main),
        isolated=tuple(np.flatnonzero(start > 0) for start in starts),
        labels=tuple(text.labels for sample in samples for text in sample.record.texts),
        prompt=tuple(text.prompt for sample in samples for text in sample.record.texts),
        plain_tokens=sum(sample.record.length for sample in samples),
    )


def _inputs(rows: Rows, costs: Costs | None) -> Batch:
    """Return the input tensors of the model for one pass.

    Args:
        rows: of the pass.
        costs: by which its segments are cut into calls; None for one variable-length call.
    """
    batch = _tensors(input_ids=rows.ids, attention_mask=np.ones_like(rows.ids))
    if not rows.branches:
        return batch
    batch |= _tensors(position_ids=rows.positions, start=rows.start, end=rows.end)
    batch["isolates"] = bool(rows.start.any())
    if rows.segments is not None:
        batch |= segment_values(varlen_segments(rows.segments) if costs is None else calls(rows.segments, costs))
    return batch


def _tensors(**arrays: NDArray[np.integer]) -> Batch:
    return Batch({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})
