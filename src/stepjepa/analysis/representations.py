"""Embeddings of the views of records, read off a model at any layer, from the sequences that training runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from torch import Tensor

from stepjepa.batch.collate import Collator, Item
from stepjepa.batch.dataset import BLOCK
from stepjepa.batch.sequences import Readout, TokenizedRecord
from stepjepa.batch.sequences import Sequence as Tokens
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.models.encode import Encoded, check_layer, encode
from stepjepa.models.setup import packing, set_up_attention

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Reading(NamedTuple):
    """Where in the model embeddings are read."""

    layer: int = -1
    """Index of ``hidden_states``: 0 is the embedding layer, -1 the last layer after the final norm."""
    pooling: Literal["last", "mean", "trained"] = "last"
    """``last`` takes the readout, ``mean`` the mean over the view up to the readout (the template around it where the
    view stands alone, and its predictor tokens, are parts of it), ``trained`` what ``JepaConfig.pooling`` says."""


@dataclass(frozen=True)
class ViewEmbeddings:
    """The embeddings of all P pairs of some records, in the records' order."""

    source: NDArray[np.float32]  # [P, D]
    target: NDArray[np.float32]  # [P, D]
    record: NDArray[np.int64]  # [P], index of the record that a pair is of
    pair: NDArray[np.int64]  # [P], which of its record's pairs, from 1; for Step-JEPA the number of the source step

    def __len__(self) -> int:
        return len(self.record)


def embed_views(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    config: JepaConfig,
    reading: Reading | None = None,
    *,
    batch_size: int = 16,
) -> ViewEmbeddings:
    """Embed the views of all pairs of some records.

    Args:
        model: in evaluation mode, not wrapped.
        tokenizer: with the predictor tokens that ``config`` asks for.
        records: any; those without a pair, or left out for their length, have no embeddings.
        config: a mode with views, in a layout other than ``inplace``.
        reading: layer and pooling; None reads as training does, but for a predictor head, which is no part of Enc.
        batch_size: records per batch.

    Raises:
        UserError: no record has a pair, the model can't be run on views or has no such layer, its numbers overflow, or
            the memory is too small.
    """
    from tqdm.auto import tqdm

    reading = reading or Reading(config.jepa_layer, "trained")
    try:
        encoding, _ = set_up_attention(model, replace(config, encoding="auto", jepa_layer=-1))
        check_layer(model.config.get_text_config().num_hidden_layers, reading.layer)
    except ValueError as error:
        raise UserError(str(error).replace("jepa_layer:", "--layer:")) from None
    made = RecordTokenizer(tokenizer, config)
    blocks = (made.tokenize_each(records[start : start + BLOCK]) for start in range(0, len(records), BLOCK))
    tokenized = enumerate(chain.from_iterable(blocks))
    found = {index: record for index, record in tokenized if record is not None and record.pairs}
    path = records[0].path if records else None
    if not found:
        raise UserError(
            f"none of {len(records)} records has a pair of {config.mode} views; see --step_separator and --max_length",
            path=path,
        )
    collator = _Reader.of(
        config,
        made.predictors.tolist(),
        encoding=encoding,
        pooling=reading.pooling,
        path=path,
        **packing(model, config, model.device.type),
    )
    # Long ones first, so that memory problems show at once; like lengths together, so that there is little padding.
    order = sorted(found, key=lambda index: -len(found[index].ids))
    embeddings: dict[int, NDArray[np.float32]] = {}  # [pairs of the record, 2, D]
    bar = tqdm(total=len(order), desc="embed", unit="rec", file=sys.stderr, disable=not sys.stderr.isatty())
    with bar, torch.inference_mode():
        for start in range(0, len(order), batch_size):
            some = order[start : start + batch_size]
            try:
                batch = send_to_device(collator(Item(found[index]) for index in some), model.device)
                both = encode(model, batch, _both, layer=reading.layer)["both"]
            except torch.OutOfMemoryError:
                raise UserError(f"out of memory with --batch_size {batch_size}; lower it") from None
            parts = both.split([len(found[index].pairs) for index in some])
            embeddings.update(zip(some, (part.cpu().numpy() for part in parts), strict=True))
            bar.update(len(some))
    joined = np.concatenate([embeddings[index] for index in found])  # [P, 2, D]
    if not np.isfinite(joined).all():
        raise UserError("some embeddings are not finite; the model's numbers overflow: try --dtype float32")
    return ViewEmbeddings(
        np.ascontiguousarray(joined[:, 0]),
        np.ascontiguousarray(joined[:, 1]),
        np.asarray([index for index, record in found.items() for _ in record.pairs]),
        np.asarray([number for record in found.values() for number in range(1, len(record.pairs) + 1)]),
    )


def _both(encoded: Encoded) -> dict[str, Tensor]:
    """``[P, 2, D]``: source and target embeddings."""
    return {"both": torch.stack(encoded.pairs, dim=1).float()}


@dataclass(frozen=True)
class _Reader(Collator):
    """Collates the views of records alone, and reads them as :class:`Reading` says."""

    pooling: str = "trained"
    path: str = ""

    def sequences(self, item: Item) -> list[Tokens]:
        """What is read of a record."""
        found = [sequence for sequence in super().sequences(item) if sequence.readouts]
        if self.pooling == "trained":
            return found
        return [
            replace(each, readouts=tuple(self._pooled(item.record, read) for read in each.readouts)) for each in found
        ]

    def _pooled(self, record: TokenizedRecord, read: Readout) -> Readout:
        if self.pooling == "last":
            return read._replace(start=read.end - 1)
        # The first view of a pair may stand in the main text, behind what is no part of it; all others stand alone.
        first = record.pairs[read.pair].first
        in_text = first.in_main and (read.kind == "target") == self.reading.reverse
        start = first.start if in_text else 0
        if start >= read.end:
            raise UserError(
                "--pooling mean: the readout stands outside its view, by --last_token; use --pooling last",
                path=self.path,
                line=record.line,
            )
        return read._replace(start=start)
