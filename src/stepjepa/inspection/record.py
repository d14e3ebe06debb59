"""What records become, token by token, and what a whole file holds: plain data for people and for machines.

Sequences and rows are those that training itself would build; nothing is worked out a second time here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stepjepa.batch.collate import Collator, Item
from stepjepa.batch.dataset import BLOCK, count_tokens
from stepjepa.batch.mask import Trees, dense
from stepjepa.batch.pack import pack
from stepjepa.batch.sequences import Sequence, TokenizedRecord
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer, step_views
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["shared", "main", "source", "target"]


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token of the rows, which stand behind each other without padding.

    Token q sees token k if and only if ``start[q] <= k <= q < end[k]``.
    """

    place: int  # its index
    id: int
    text: str
    branch: int  # index of its branch
    position: int  # its position id, the depth in the tree
    start: int  # first token that it sees
    end: int  # one past the last token that sees it
    labels: tuple[int, ...]  # ids of the tokens that this position must predict, one for each label
    label_texts: tuple[str, ...]
    readouts: tuple[str, ...]  # what is read here, such as 'source 1' for the source of pair 1


@dataclass(frozen=True, slots=True)
class BranchInfo:
    """Neighbouring tokens that the same sequences pass through."""

    index: int
    row: int
    kind: Kind  # 'shared' if several sequences pass through it, else what it is part of
    sequences: tuple[int, ...]  # indices of those
    parent: int | None  # index of the branch before it in its sequences; None where they begin
    isolated: bool  # it sees only itself (layout 'inplace')
    start: int  # its first token
    end: int  # one past its last token


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Token ids that the model reads as if by themselves."""

    name: str  # such as 'main' or 'source 1', with the record's line if several records are shown
    kind: Kind
    tokens: int  # how many it has
    shared: int  # how many of them other sequences pass through as well
    places: tuple[tuple[int, int], ...]  # ranges [start, end) of the tokens on its path through the tree


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A message or a step of a record."""

    name: str  # the role, or 'step 1' and so on
    text: str  # as the record has it
    start: int | None  # position of its first token in the main sequence; None where nothing of it is left there
    end: int | None  # one past the position of its last token
    cut: bool  # truncation took some of it


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What was found in a record."""

    line: int  # in the file, counted from 1
    messages: tuple[PartInfo, ...]
    steps: tuple[PartInfo, ...]  # of the last assistant message
    pairs: int  # usable pairs of views
    pairs_cut: int  # pairs lost to truncation
    main_tokens: int  # of the main text: what plain fine-tuning runs
    full_tokens: int  # the same before truncation


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is in the whole file."""

    lines: int  # records in the file, skipped ones included
    counts: dict[str, int]  # see tokenize.COUNTS
    tokens: dict[str, int]  # 'main' and 'all', see dataset.Prepared
    notes: tuple[str, ...]  # where this differs from what training would do


@dataclass(frozen=True, slots=True)
class Inspection:
    """Some records as a micro-batch, and what surrounds them."""

    path: str
    index: int  # of the first record, counted from 0
    config: JepaConfig
    tokens: tuple[TokenInfo, ...]  # of all rows
    branches: tuple[BranchInfo, ...]  # in the order of their tokens
    sequences: tuple[SequenceInfo, ...]  # in the order of their records
    records: tuple[RecordInfo, ...]
    file: FileInfo
    template: dict[str, str]  # what was derived from the chat template

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists and scalars, for JSON."""
        return asdict(self)


def inspect_records(
    records: Many[Record], index: int, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, count: int = 1
) -> Inspection:
    """Pack some records as one micro-batch and describe it, with the counts of the whole file.

    A record that would stop training (too long, or without a pair where one is required) does not stop the
    inspection: it is shown truncated, and counted. Without ``row_length`` there is one row.

    Args:
        records: of one file.
        index: the first one to show, counted from 0.
        tokenizer: with predictor tokens and a chat template.
        config: see ``JepaConfig``.
        count: how many to show, or as many as there are.

    Raises:
        UserError: there is no such record, training skips it, or a record can't be rendered.
    """
    if not 0 <= index < len(records):
        path = records[0].path if records else None
        raise UserError(
            f"--index {index}: the file has {len(records)} records; choose 0 to {len(records) - 1}", path=path
        )
    lenient = replace(
        config, over_length="truncate" if config.over_length == "error" else config.over_length, require_pairs=False
    )
    made = RecordTokenizer(tokenizer, lenient)
    collator = Collator.of(config, made.predictors.tolist())
    parts: list[list[Sequence]] = []
    infos: list[RecordInfo] = []
    for record in records[index : index + count]:
        found, lost = made.tokenize([record]), made.counts["pairs cut by truncation"]
        if not found:
            raise UserError(_why_skipped(lenient), path=record.path, line=record.line)
        parts.append(collator.sequences(Item(found[0])))
        infos.append(_describe(record, found[0], made, parts[-1][0], lost - sum(info.pairs_cut for info in infos)))
    tree = _describe_tree(parts, [info.line for info in infos], config, tokenizer)
    counted = _count_file(records, tokenizer, config, lenient)
    return Inspection(
        records[index].path, index, config, *tree, records=tuple(infos), file=counted, template=made.template.describe()
    )


def visible_matrix(inspection: Inspection) -> NDArray[np.bool_]:
    """``[T, T]``: the query (dim 0) sees the key (dim 1)."""
    integers = [(token.start, token.end, token.position) for token in inspection.tokens]
    start, end, position = torch.tensor(integers).T[:, None]
    found: NDArray[np.bool_] = dense(Trees(start, end, position, isolates=True))[0, 0].numpy()
    return found


def token_text(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    """The text of one token, its leading blank included; a part of a character stays a replacement mark."""
    text = str(tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(index))
    # Vocabularies that mark a word's start with U+2581 lose the blank when a token is decoded by itself.
    if piece.startswith("\u2581") and not text.startswith(" "):
        return f" {text}"
    return text or piece


def _why_skipped(config: JepaConfig) -> str:
    if config.over_length == "skip":
        remedy = "and --over_length skip leaves it out; pass --over_length truncate, or raise --max_length"
    else:
        remedy = "and what is left after truncation has no answer to learn; raise --max_length"
    return f"the record has more tokens than max_length {config.max_length}, {remedy}"


def _describe(
    record: Record, tokenized: TokenizedRecord, made: RecordTokenizer, main: Sequence, pairs_cut: int
) -> RecordInfo:
    """The messages and the steps of a record with the positions they stand at."""
    whole = made.template.render(record.messages)
    tokens = made.tokens(whole)
    text = main.text.tolist()

    def part(name: str, content: str, first: int, last: int) -> PartInfo:
        kept, cut = min(last, len(text)), last > len(text)
        if first >= kept:
            return PartInfo(name, content, None, None, cut)
        return PartInfo(name, content, text[first], text[kept - 1] + 1, cut)

    messages = tuple(
        part(message["role"], message["content"], tokens.first_overlapping(start), tokens.first_from(end))
        for message, (start, end) in zip(record.messages, whole.spans, strict=True)
    )
    steps = tuple(
        part(f"step {number}", whole.text[step.start : step.end], *step.place(tokens))
        for number, step in enumerate(step_views(record, whole, made.config.step_separator), start=1)
    )
    # Behind the last turn a template may write what teaches nothing.
    full = tokens.first_from(whole.turn_ends[-1]) if made.config.labels == "assistant" else len(tokens.ids)
    return RecordInfo(record.line, messages, steps, len(tokenized.pairs), pairs_cut, len(tokenized.ids), full)


def _describe_tree(
    parts: Many[Many[Sequence]], lines: Many[int], config: JepaConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[TokenInfo, ...], tuple[BranchInfo, ...], tuple[SequenceInfo, ...]]:
    """The sequences of some records (``parts``) in rows that stand behind each other without padding."""
    owners = [number for number, part in enumerate(parts) for _ in part]
    everything = [sequence for part in parts for sequence in part]
    rows = pack(
        everything,
        row_length=config.row_length or sum(map(len, everything)),
        groups=None if config.share_prefixes else owners,
        one_each=config.encoding == "rows",
    )
    width = rows.ids.shape[1]
    kept = np.concatenate([row * width + np.arange(length) for row, length in enumerate(rows.lengths)])
    numbers = np.full(rows.ids.size, -1)
    numbers[kept] = np.arange(len(kept))
    row_of = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    first = (np.cumsum(rows.lengths) - rows.lengths)[row_of]
    ids, positions = rows.ids.ravel()[kept].tolist(), rows.positions.ravel()[kept].tolist()
    starts, ends = ((each.ravel()[kept] + first).tolist() for each in (rows.start, rows.end))
    # Of each token its sequences, the token before it in them, and whether layout 'inplace' made it part of a view.
    passing: list[list[int]] = [[] for _ in kept]
    before = np.full(len(kept), -1)
    inside: list[Kind | None] = [None] * len(kept)
    labels: list[list[int]] = [[] for _ in kept]
    readouts: list[list[str]] = [[] for _ in kept]
    paths = [numbers[path] for path in rows.paths]
    suffixes = ["" if len(lines) == 1 else f" of line {lines[owner]}" for owner in owners]
    kinds: list[Kind] = ["main" if len(each.text) else each.readouts[0].kind for each in everything]
    for number, (sequence, path, suffix) in enumerate(zip(everything, paths, suffixes, strict=True)):
        before[path[1:]] = path[:-1]
        text = set(sequence.text.tolist())
        for step, place in enumerate(path.tolist()):
            passing[place].append(number)
            if text and step not in text:
                inside[place] = "source"
            elif sequence.start is not None and sequence.start[step]:
                inside[place] = "target"
        for step, label in sequence.labels.tolist():
            labels[path[step]].append(label)
        for pair, kind, start, end in sequence.readouts:
            mean = f" (mean of {end - start} tokens)" if end - start > 1 else ""
            readouts[path[end - 1]].append(f"{kind} {pair + 1}{suffix}{mean}")
    keys = list(zip(passing, inside, starts, strict=True))
    bounds = [place for place in range(len(keys)) if not place or keys[place] != keys[place - 1]]
    branch_of = np.repeat(np.arange(len(bounds)), np.diff([*bounds, len(keys)])).tolist()
    branches = []
    for index, (start, end) in enumerate(zip(bounds, [*bounds[1:], len(keys)], strict=True)):
        own = inside[start] or ("shared" if len(passing[start]) > 1 else kinds[passing[start][0]])
        parent = branch_of[before[start]] if before[start] >= 0 else None
        isolated = inside[start] == "target"
        row = int(row_of[start])
        branches.append(BranchInfo(index, row, own, tuple(passing[start]), parent, isolated, start, end))
    texts = {index: token_text(tokenizer, index) for index in {*ids, *chain.from_iterable(labels)}}
    tokens = [
        TokenInfo(
            place=place,
            id=index,
            text=texts[index],
            branch=branch_of[place],
            position=positions[place],
            start=starts[place],
            end=ends[place],
            labels=tuple(labels[place]),
            label_texts=tuple(texts[label] for label in labels[place]),
            readouts=tuple(readouts[place]),
        )
        for place, index in enumerate(ids)
    ]
    sequences = []
    for sequence, path, suffix, own in zip(everything, paths, suffixes, kinds, strict=True):
        name = own if own == "main" else f"{own} {sequence.readouts[0].pair + 1}"
        shared = sum(len(passing[place]) > 1 for place in path)
        runs = np.split(path, np.flatnonzero(np.diff(path) != 1) + 1)
        ranges = tuple((int(run[0]), int(run[-1]) + 1) for run in runs)
        sequences.append(SequenceInfo(f"{name}{suffix}", own, len(sequence), shared, ranges))
    return tuple(tokens), tuple(branches), tuple(sequences)


def _count_file(
    records: Many[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig, lenient: JepaConfig
) -> FileInfo:
    """The counts of all records, with nothing in ``lenient`` that stops at one."""
    from tqdm.auto import tqdm

    made = RecordTokenizer(tokenizer, lenient)
    tokens = {"main": 0, "all": 0}
    with tqdm(total=len(records), desc="count", unit="rec", leave=False, disable=not sys.stderr.isatty()) as bar:
        for start in range(0, len(records), BLOCK):
            block = records[start : start + BLOCK]
            for name, count in count_tokens(made.tokenize(block), lenient).items():
                tokens[name] += count
            bar.update(len(block))
    counts = {name: made.counts[name] for name in COUNTS}
    notes = []
    if config.over_length != lenient.over_length and counts["over length"]:
        notes.append("over_length is 'error': training stops at the first record over length; here it is truncated")
    if config.require_pairs and counts["without a pair"]:
        notes.append("require_pairs is on: training stops at the first record without a pair")
    if config.uses_views and not counts["pairs"]:
        notes.append("no record has a pair of views: training refuses this file")
    return FileInfo(len(records), counts, tokens, tuple(notes))
