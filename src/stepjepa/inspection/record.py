"""What one record becomes, token by token, and what a whole file holds: plain data for people and for machines.

Everything is read off the forests that training itself would build; nothing is worked out a second time here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.forest import IGNORE, Forest, Kind, key_ranges
from stepjepa.forests.preparation import BLOCK, COUNTS
from stepjepa.forests.segments import ForestBuilder, token_spans
from stepjepa.forests.views import step_views

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token of the row.

    Attributes:
        row: its index in the row.
        id: its token id.
        text: the text it stands for.
        segment: index of its segment.
        position: its position id.
        label: id of the token that this position must predict, if any.
        label_text: that token's text.
        sees: row ranges ``[start, end)`` of the keys it sees.
        readouts: what is read here, such as ``source 1`` for the source of pair 1.
    """

    row: int
    id: int
    text: str
    segment: int
    position: int
    label: int | None
    label_text: str | None
    sees: tuple[tuple[int, int], ...]
    readouts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment; ``parent`` is None for a root, the other fields are those of ``forest.Segment``."""

    index: int
    kind: Kind
    parent: int | None
    attachment: int
    isolated: bool
    start: int
    end: int
    tokens: int
    first_position: int


@dataclass(frozen=True, slots=True)
class PairInfo:
    """The rows at which the two embeddings of a pair are read; ``pair`` counts from 1."""

    pair: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A message or a step of the record.

    Attributes:
        name: the role, or ``step 1`` and so on.
        text: its content as the record has it.
        start: first row of the content; None where nothing of it is left in the row.
        end: one past its last row.
        cut: truncation took some of it.
    """

    name: str
    text: str
    start: int | None
    end: int | None
    cut: bool


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What was found in the record.

    Attributes:
        messages: with their spans in the row.
        steps: of the last assistant message.
        pairs: usable pairs of views.
        pairs_cut: pairs lost to truncation.
        tokens: length of the row.
        main_tokens: of these, the tokens of the main text: the row of plain fine-tuning.
        full_tokens: tokens of the main text before truncation.
        over_length: ``full_tokens`` is more than ``max_length``.
    """

    messages: tuple[PartInfo, ...]
    steps: tuple[PartInfo, ...]
    pairs: int
    pairs_cut: int
    tokens: int
    main_tokens: int
    full_tokens: int
    over_length: bool


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is in the whole file.

    Attributes:
        lines: records in the file, those included that training would leave out.
        counts: see ``preparation.COUNTS``.
        tokens: of all rows.
        main_tokens: of the main texts alone, which is what plain fine-tuning runs.
        over_regular: their ratio, the price of the views.
        notes: where this differs from what training would do.
    """

    lines: int
    counts: dict[str, int]
    tokens: int
    main_tokens: int
    over_regular: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """A record's forest and what surrounds it.

    Attributes:
        path: the file.
        index: of the record, counted from 0.
        line: of the record in the file, counted from 1.
        config: what was asked for.
        tokens: in row order.
        segments: in row order.
        pairs: the readouts.
        record: what was found in the record.
        file: what was found in the file.
        template: what was derived from the chat template.
    """

    path: str
    index: int
    line: int
    config: JepaConfig
    tokens: tuple[TokenInfo, ...]
    segments: tuple[SegmentInfo, ...]
    pairs: tuple[PairInfo, ...]
    record: RecordInfo
    file: FileInfo
    template: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists and scalars, for JSON."""
        return asdict(self)


def inspect_record(
    records: Sequence[Record], index: int, tokenizer: PreTrainedTokenizerBase, config: JepaConfig
) -> Inspection:
    """Build the forest of one record and describe it, with the counts of all records.

    A record that would stop training (too long, or without a pair where one is required) does not stop the
    inspection: it is shown truncated, and counted.

    Args:
        records: of one file.
        index: which one to show, counted from 0.
        tokenizer: with predictor tokens and a chat template.
        config: see ``JepaConfig``.

    Raises:
        UserError: there is no such record, it is left out of training, or a record can't be rendered.
    """
    if not 0 <= index < len(records):
        path = records[0].path if records else None
        raise UserError(
            f"--index {index}: the file has {len(records)} records; choose 0 to {len(records) - 1}", path=path
        )
    record = records[index]
    lenient = replace(
        config, over_length="truncate" if config.over_length == "error" else config.over_length, require_pairs=False
    )
    unlimited = ForestBuilder(tokenizer, replace(lenient, max_length=sys.maxsize)).build([record])[0]
    full_tokens = len(unlimited.without_views())
    builder = ForestBuilder(tokenizer, lenient)
    built = builder.build([record])
    if not built:
        reason = (
            "and --over_length skip leaves it out; pass --over_length truncate, or raise --max_length"
            if config.over_length == "skip"
            else "and what is left after truncation has no answer to learn; raise --max_length"
        )
        raise UserError(
            f"the record has {full_tokens} tokens, more than max_length {config.max_length}, {reason}",
            path=record.path,
            line=record.line,
        )
    forest = built[0]
    messages, steps = _parts(record, builder, forest)
    return Inspection(
        path=record.path,
        index=index,
        line=record.line,
        config=config,
        tokens=_tokens(forest, tokenizer),
        segments=tuple(
            SegmentInfo(
                number,
                segment.kind,
                segment.parent if segment.parent >= 0 else None,
                segment.attachment,
                segment.isolated,
                segment.start,
                segment.end,
                len(segment),
                int(forest.position_ids[segment.start]),
            )
            for number, segment in enumerate(forest.segments)
        ),
        pairs=tuple(PairInfo(number, int(s), int(t)) for number, (s, t) in enumerate(forest.pairs, start=1)),
        record=RecordInfo(
            messages,
            steps,
            pairs=len(forest.pairs),
            pairs_cut=builder.counts["pairs cut by truncation"],
            tokens=len(forest),
            main_tokens=len(forest.without_views()),
            full_tokens=full_tokens,
            over_length=full_tokens > config.max_length,
        ),
        file=count_file(records, tokenizer, config, lenient),
        template=builder.template.describe(),
    )


def count_file(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig, lenient: JepaConfig
) -> FileInfo:
    """The counts of all records.

    Args:
        records: of one file.
        tokenizer: with predictor tokens and a chat template.
        config: what was asked for.
        lenient: the same, with nothing in it that stops at a record.
    """
    from tqdm.auto import tqdm

    builder = ForestBuilder(tokenizer, lenient)
    tokens = main_tokens = 0
    with tqdm(total=len(records), desc="count", unit="rec", leave=False, disable=not sys.stderr.isatty()) as bar:
        for start in range(0, len(records), BLOCK):
            block = records[start : start + BLOCK]
            for forest in builder.build(block):
                tokens += len(forest)
                main_tokens += len(forest.without_views())
            bar.update(len(block))
    counts = {name: builder.counts[name] for name in COUNTS}
    notes = []
    if config.over_length != lenient.over_length and counts["over length"]:
        notes.append("over_length is 'error': training stops at the first record over length; here it is truncated")
    if config.require_pairs and counts["without a pair"]:
        notes.append("require_pairs is on: training stops at the first record without a pair")
    if config.uses_views and not counts["pairs"]:
        notes.append("no record has a pair of views: training refuses this file")
    return FileInfo(len(records), counts, tokens, main_tokens, tokens / max(main_tokens, 1), tuple(notes))


def visible_matrix(inspection: Inspection) -> NDArray[np.bool_]:
    """``[T, T]``: the query (dim 0) sees the key (dim 1)."""
    visible = np.zeros((len(inspection.tokens), len(inspection.tokens)), np.bool_)
    for token in inspection.tokens:
        for start, end in token.sees:
            visible[token.row, start:end] = True
    return visible


def token_text(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    """The text of one token, its leading blank included; a part of a character stays a replacement mark."""
    text = str(tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(index))
    # Vocabularies that mark a word's start with U+2581 lose the blank when a token is decoded by itself.
    if piece.startswith("\u2581") and not text.startswith(" "):
        return f" {text}"
    return text or piece


def _tokens(forest: Forest, tokenizer: PreTrainedTokenizerBase) -> tuple[TokenInfo, ...]:
    texts: dict[int, str] = {}

    def text_of(index: int) -> str:
        if index not in texts:
            texts[index] = token_text(tokenizer, index)
        return texts[index]

    readouts: dict[int, list[str]] = {}
    for number, rows in enumerate(forest.pairs.tolist(), start=1):
        for row, name in zip(rows, ("source", "target"), strict=True):
            readouts.setdefault(row, []).append(f"{name} {number}")
    owners = [index for index, segment in enumerate(forest.segments) for _ in range(len(segment))]
    ids, labels = forest.input_ids.tolist(), forest.shift_labels.tolist()
    return tuple(
        TokenInfo(
            row,
            ids[row],
            text_of(ids[row]),
            owners[row],
            int(forest.position_ids[row]),
            None if labels[row] == IGNORE else labels[row],
            None if labels[row] == IGNORE else text_of(labels[row]),
            tuple(ranges),
            tuple(readouts.get(row, ())),
        )
        for row, ranges in enumerate(key_ranges(forest))
    )


def _parts(record: Record, builder: ForestBuilder, forest: Forest) -> tuple[tuple[PartInfo, ...], tuple[PartInfo, ...]]:
    """The messages and the steps of a record with the rows they stand at."""
    whole = builder.template.render(record.messages)
    tokens = builder.tokenize(whole)
    in_text = [s for s in forest.segments if s.kind == "main" or (s.kind == "target" and s.parent >= 0)]
    rows = [row for segment in in_text for row in range(segment.start, segment.end)]

    def part(name: str, text: str, first: int, last: int) -> PartInfo:
        kept = min(last, len(rows))
        if first >= kept:
            return PartInfo(name, text, None, None, last > len(rows))
        return PartInfo(name, text, rows[first], rows[kept - 1] + 1, last > len(rows))

    messages = tuple(
        part(message["role"], message["content"], tokens.first_overlapping(start), tokens.first_from(end))
        for message, (start, end) in zip(record.messages, whole.spans, strict=True)
    )
    views = step_views(record, builder.config.step_separator)
    spans = zip(views, token_spans(views, record, whole, tokens), strict=True)
    steps = tuple(
        part(f"step {number}", record.answer[step.start : step.end], *span)
        for number, (step, span) in enumerate(spans, start=1)
    )
    return messages, steps
