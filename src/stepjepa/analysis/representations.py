"""Embeddings of the views of records, read off a model at any layer, through the forests that training builds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import Forest
from stepjepa.forests.preparation import BLOCK
from stepjepa.forests.segments import ForestBuilder, token_spans
from stepjepa.forests.views import SpanView, find_pairs
from stepjepa.models.architecture import find_decoder
from stepjepa.models.probe import choose_encoding
from stepjepa.models.attention import enable_forest, forest_visibility
from stepjepa.models.embeddings import check_layer as check_layer_number
from stepjepa.models.embeddings import decoder_inputs, hidden_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Reading:
    """Where in the model embeddings are read.

    Attributes:
        layer: index of ``hidden_states``: 0 is the embedding layer, -1 the last layer after the final norm.
        pooling: ``last`` takes the readout, ``mean`` the mean over the view up to the readout: the template around it
            where the view stands alone, and its predictor tokens, are parts of it. ``trained`` is what the
            configuration of training says, see ``JepaConfig.pooling``.

    Raises:
        ValueError: no such pooling.
    """

    layer: int = -1
    pooling: str = "last"

    def __post_init__(self) -> None:
        if self.pooling not in ("last", "mean", "trained"):
            raise ValueError(f"pooling: expected last, mean or trained, got '{self.pooling}'")


@dataclass(frozen=True)
class ViewEmbeddings:
    """The embeddings of all pairs of some records, in the records' order.

    Attributes:
        source: ``[P, D]`` float32.
        target: ``[P, D]`` float32.
        record: ``[P]``, index of the record that a pair is of.
        pair: ``[P]``, which of its record's pairs it is, counted from 1; for Step-JEPA the number of the source step.
    """

    source: NDArray[np.float32]
    target: NDArray[np.float32]
    record: NDArray[np.int64]
    pair: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.record)


@dataclass(frozen=True)
class _Job:
    """A forest and the rows whose mean is the embedding of each view of its pairs."""

    record: int
    forest: Forest
    views: tuple[tuple[Rows, Rows], ...]


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
    if not config.uses_views or config.layout == "inplace":
        raise ValueError(f"expected views in branched or separate layout, got {config.mode} {config.layout}")
    check_layer(model, reading.layer)
    try:
        encoding, _ = choose_encoding(model, "auto")
    except ValueError as error:
        raise UserError(str(error)) from None
    if encoding == "forest":
        enable_forest(model)
    jobs = list(_jobs(records, tokenizer, config, reading.pooling))
    if not jobs:
        remedy = "step_separator and max_length" if config.mode == "step-jepa" else "max_length"
        path = records[0].path if records else None
        raise UserError(
            f"none of the {len(records)} records has a pair of {config.mode} views; check {remedy}", path=path
        )
    # Long ones first, so that memory problems show at once; like lengths together, so that there is little padding.
    order = sorted(range(len(jobs)), key=lambda index: -len(jobs[index].forest))
    found: dict[int, NDArray[np.float32]] = {}
    bar = tqdm(total=len(jobs), desc="embed", unit="rec", file=sys.stderr, disable=not sys.stderr.isatty())
    with bar, torch.inference_mode():
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            try:
                embeddings = _embed([jobs[index] for index in batch], model, encoding, reading.layer)
            except torch.OutOfMemoryError:
                raise UserError(f"out of memory with --batch_size {batch_size}; lower it") from None
            found.update(zip(batch, embeddings, strict=True))
            bar.update(len(batch))
    both = np.concatenate([found[index] for index in range(len(jobs))])  # [P, 2, D]
    if not np.isfinite(both).all():
        raise UserError("some embeddings are not finite; the model's numbers overflow: try --dtype float32")
    return ViewEmbeddings(
        np.ascontiguousarray(both[:, 0]),
        np.ascontiguousarray(both[:, 1]),
        np.asarray([job.record for job in jobs for _ in job.views]),
        np.asarray([number for job in jobs for number in range(1, len(job.views) + 1)]),
    )


def check_layer(model: Any, layer: int) -> None:
    """Refuse a layer that a model does not have.

    Raises:
        UserError: it is out of range.
    """
    try:
        check_layer_number(model.config.get_text_config().num_hidden_layers, layer)
    except ValueError as error:
        raise UserError(str(error).replace("jepa_layer:", "--layer:")) from None


def _jobs(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig, pooling: str
) -> Iterator[_Job]:
    from tqdm.auto import tqdm

    builder = ForestBuilder(tokenizer, config)
    with tqdm(total=len(records), desc="prepare", unit="rec", disable=not sys.stderr.isatty()) as bar:
        for start in range(0, len(records), BLOCK):
            block = records[start : start + BLOCK]
            built: Sequence[Forest | None] = builder.build(block)
            if len(built) < len(block):
                # Some were left out: which ones shows only when each is built by itself.
                built = [next(iter(builder.build([record])), None) for record in block]
            for index, (record, forest) in enumerate(zip(block, built, strict=True), start):
                if forest is not None and len(forest.pairs):
                    yield _Job(index, forest, _view_rows(forest, record, builder, pooling))
            bar.update(len(block))


def _view_rows(forest: Forest, record: Record, builder: ForestBuilder, pooling: str) -> tuple[tuple[Rows, Rows], ...]:
    """For the source and the target of each pair the rows that are pooled."""
    if pooling == "last":
        return tuple((pair[:1].astype(np.int64), pair[1:].astype(np.int64)) for pair in forest.pairs)
    if pooling == "trained":
        pooled = np.ones_like(forest.pairs) if forest.pooled is None else forest.pooled
        firsts = forest.pairs - pooled + 1
        both = zip(firsts.tolist(), forest.pairs.tolist(), strict=True)
        return tuple((np.arange(a, b + 1), np.arange(c, d + 1)) for (a, c), (b, d) in both)
    spans: list[tuple[int, int]] = []
    views = {view for pair in find_pairs(record, builder.config) for view in (pair.first, pair.second)}
    inside = [view for view in views if isinstance(view, SpanView)]
    if inside:
        whole = builder.template.render(record.messages)
        tokens = builder.tokenize(whole)
        spans = token_spans(inside, record, whole, tokens)

    def beginning(last: int) -> int:
        """First row of the view in the main text that a row is part of."""
        starts = [start for start, end in spans if start <= last < end]
        if not starts:
            raise UserError(
                "--pooling mean: the readout stands outside its view, by --last_token; use --pooling last",
                path=record.path,
                line=record.line,
            )
        return starts[0]

    def rows(readout: int) -> Rows:
        segment = next(s for s in forest.segments if s.start <= readout < s.end)
        if segment.kind == "main":
            return np.arange(beginning(readout), readout + 1)
        own = np.arange(segment.start, readout + 1)
        if segment.parent < 0 or builder.config.front_pred:
            # The segment has all of the view in it.
            return own
        return np.concatenate([np.arange(beginning(segment.attachment - 1), segment.attachment), own])

    return tuple((rows(source), rows(target)) for source, target in forest.pairs.tolist())


def _embed(jobs: Sequence[_Job], model: Any, encoding: str, layer: int) -> list[NDArray[np.float32]]:
    """``[P, 2, D]`` for each job."""
    read: list[Forest] = []
    for job in jobs:
        every = np.concatenate([rows for view in job.views for rows in view]).astype(np.int32)
        # The collator finds the place of the two ends of a pair in either encoding; here every row stands for itself.
        read.append(replace(job.forest, pairs=np.stack([every, every], axis=1), pooled=None))
    batch = {name: value.to(model.device) for name, value in ForestCollator(0, encoding)(read).items()}
    hidden = _hidden(model, batch, layer)
    states = hidden.reshape(-1, hidden.shape[-1])[batch["source_index"]].float()  # [rows of all views, D]
    result: list[NDArray[np.float32]] = []
    place = 0
    for job in jobs:
        views = []
        for view in job.views:
            for rows in view:
                views.append(states[place : place + len(rows)].mean(0))
                place += len(rows)
        result.append(torch.stack(views).reshape(len(job.views), 2, -1).cpu().numpy())
    return result


def _hidden(model: Any, batch: dict[str, Tensor], layer: int) -> Tensor:
    """``[R, T, D]``: the hidden states of a layer."""
    layer = -1 if layer == model.config.get_text_config().num_hidden_layers else layer
    inputs, visibility = decoder_inputs(batch, layer)
    with forest_visibility(visibility):
        output = find_decoder(model)(**inputs)
    hidden: Tensor = output.last_hidden_state if layer == -1 else hidden_state(output, layer)
    return hidden
