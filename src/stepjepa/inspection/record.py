"""Inspect how records are tokenised, packed and labelled, and count a whole file.

Sequences and rows are built by the functions that training uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import count_tokens
from stepjepa.batch.pack import Rows, pack
from stepjepa.batch.prepare import check_usable
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer, TrainedTurn
from stepjepa.batch.view_text import step_views
from stepjepa.chat.turn_text import Turn
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.views.sequences import Ids, Pair, SampledRecord, TokenizedRecord, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class TokenInfo:
    """One token; the rows follow each other without padding.

    Token q sees token k if and only if ``start[q] <= k <= q < end[k]``.
    """

    place: int  # its index
    id: int
    text: str
    position: int  # its position id, the depth in the tree
    start: int  # first token that it sees
    end: int  # one past the last token that sees it
    branch: int = 0  # index of its branch
    labels: list[int] = field(default_factory=list)  # ids of the tokens that this position must predict
    label_texts: list[str] = field(default_factory=list)
    # Embeddings that are read here, such as 'source 1' for the source of pair 1.
    readouts: list[str] = field(default_factory=list)
    # For each of them the number of tokens whose states it averages; this token is the last of these.
    averaged: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BranchInfo:
    """A run of tokens that belong to the same sequences."""

    index: int
    row: int
    kind: str  # 'shared' if it belongs to several sequences, else the kind of its own one
    sequences: tuple[int, ...]  # indices of these sequences
    parent: int | None  # index of the branch before it in its sequences; None for the first one
    isolated: bool  # it sees only itself (layout 'inplace')
    start: int  # its first token
    end: int  # one past its last token


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence of tokens, whose hidden states are those of a pass over this sequence alone."""

    # Such as 'main' or 'source 1', with the record's line if several records are shown; 'main 1', 'main 2' where a
    # template that rewrites earlier turns needs several texts.
    name: str
    # 'main', 'source' or 'target'; 'other' for one of a custom layout that is no main text and has no readout.
    kind: str
    tokens: int  # number of its tokens
    shared: int  # number of those that belong to other sequences, too
    places: tuple[tuple[int, int], ...]  # ranges [start, end) of the tokens on its path through the tree


@dataclass(frozen=True, slots=True)
class Inspection:
    """Some records as a micro-batch, counts of their file, facts of the chat template."""

    path: str
    index: int  # of the first record, counted from 0
    config: JepaConfig
    tokens: list[TokenInfo]  # those of all rows
    branches: list[BranchInfo]  # in the order of their tokens
    sequences: list[SequenceInfo]  # in the order of their records
    # For each record: 'line'; 'steps' (Step-JEPA) or 'answers', each with 'name' and the 'text' that is trained;
    # 'untrained', the names of answers that are left out; number of 'pairs'; 'views', the texts of each pair as
    # 'source' and 'target'; 'main_tokens', its length; 'main_texts', that of each of its texts.
    records: list[JsonObject]
    # For the whole file: 'lines'; 'counts', see tokenize.COUNTS; 'tokens', see dataset.Prepared.
    file: JsonObject
    template: dict[str, str]  # facts derived from the chat template
    refused: str | None = None  # the error with which training would refuse the file
    # The records among those asked for of which nothing is trained: 'line', and the 'reason'.
    left_out: list[JsonObject] = field(default_factory=list)


def inspect_records(
    records: Sequence[Record], index: int, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, count: int = 1
) -> Inspection:
    """Pack ``count`` records of a file from ``index`` on as one micro-batch and describe it, and the whole file.

    A record that would stop training (too long, or without a pair where one is required) does not stop the
    inspection: it is shown truncated, and counted, and ``refused`` is the error of training. One of which nothing is
    trained is in ``left_out``. Without ``row_length`` there is one row.

    Args:
        records: those of the whole file.
        index: the first one to describe, from 0.
        tokenizer: with the predictor tokens.
        config: of the run.
        count: number of records to describe.

    Raises:
        UserError: there is no such record, none of them is trained, or one can't be rendered.
    """
    if not 0 <= index < len(records):
        fault = f"`index {index}`: the file has {counted(len(records), 'record')}; choose 0 to {len(records) - 1}"
        raise UserError(fault, path=records[0].path if records else None)
    over = config.over_length
    lenient = replace(config, over_length="truncate" if over == "error" else over, require_pairs=False)
    record_tokenizer = RecordTokenizer(tokenizer, lenient)
    record_tokenizer.check_variables()
    tokenized = record_tokenizer.tokenize_each(records)
    collator = Collator.of(config, record_tokenizer.predictors.tolist())
    parts: list[list[TokenSequence]] = []
    infos: list[JsonObject] = []
    left_out: list[JsonObject] = []
    # It counts the records that are described once more, so the counts of the file are another one's.
    describing = RecordTokenizer(tokenizer, lenient)
    for record, tokens_of_record in zip(records[index : index + count], tokenized[index:], strict=False):
        if tokens_of_record is None:
            left_out.append({"line": record.line, "reason": _why_left_out(record, tokenizer, config)})
            continue
        parts.append(collator.sequences(SampledRecord(tokens_of_record)))
        infos.append(_describe_record(record, tokens_of_record, describing, config))
    if not infos:
        raise UserError(left_out[0]["reason"], path=records[index].path, line=left_out[0]["line"])
    tokens, branches, sequences = _describe_tree(parts, [info["line"] for info in infos], config, tokenizer)
    return Inspection(
        path=records[index].path,
        index=index,
        config=config,
        tokens=tokens,
        branches=branches,
        sequences=sequences,
        records=infos,
        file={
            "lines": len(records),
            "counts": {name: record_tokenizer.counts[name] for name in COUNTS},
            "tokens": count_tokens(filter(None, tokenized), lenient),
        },
        template=record_tokenizer.describe(),
        refused=_refusal(records, tokenizer, config, record_tokenizer),
        left_out=left_out,
    )


def _describe_record(
    record: Record, tokenized: TokenizedRecord, record_tokenizer: RecordTokenizer, config: JepaConfig
) -> JsonObject:
    """Return the line, texts, views and counts of a record, see ``Inspection.records``."""
    tokenizer, predictors = record_tokenizer.tokenizer, record_tokenizer.predictors
    views = [_view_texts(pair, tokenizer, predictors, config) for pair in tokenized.all_pairs]
    texts = _trained_texts(record, record_tokenizer.trained_turns(record), config)
    lengths = {"main_tokens": tokenized.length, "main_texts": [len(text.ids) for text in tokenized.texts]}
    return {"line": record.line, **texts, "views": views, "pairs": len(views), **lengths}


def _trained_texts(record: Record, trained: Sequence[TrainedTurn], config: JepaConfig) -> JsonObject:
    """Return the texts that a record trains, cut off where training cuts them, see ``Inspection.records``.

    They are the steps of the last turn in Step-JEPA, else the answers: of all trained turns or, where a chat is trained
    as one text, of all its assistant messages.
    """
    is_turn = config.labels == "assistant"
    answers = {f"answer {number}": it for number, it in enumerate(trained, start=1)} if is_turn else {}
    untrained = [name for name, (_, end) in answers.items() if not end]
    steps, texts = dict[str, str](), dict[str, str]()
    if config.mode == "step-jepa":
        turn, end = trained[-1]
        views = step_views(turn, config.step_separator, config.steps_from)
        cut = [turn.text[view.start : min(view.end, end)] for view in views if view.start < end]
        steps = {f"step {number}": text for number, text in enumerate(cut, start=1)}
    elif is_turn:
        texts = {name: _cut(turn, turn.message, end) for name, (turn, end) in answers.items() if end}
    else:
        turn, end = trained[0]
        answers_at = [place for place, message in enumerate(record.messages) if message["role"] == "assistant"]
        if config.plain:  # it has the last exchange or, where all of it is trained, the last question alone
            answers_at = [place for place in answers_at if turn.spans[place] != (0, 0)]
        kept = [place for place in answers_at if turn.spans[place][0] < end]
        texts = {f"answer {number}": _cut(turn, place, end) for number, place in enumerate(kept, start=1)}
    if len(texts) == 1 and not untrained:
        texts = {"answer": next(iter(texts.values()))}
    named = ([{"name": name, "text": text} for name, text in each.items()] for each in (steps, texts))
    return {**dict(zip(("steps", "answers"), named, strict=True)), "untrained": untrained}


def _cut(turn: Turn, message: int, end: int) -> str:
    """Return the content of a message in the text of a turn, up to the character ``end``."""
    start, behind = turn.spans[message]
    return turn.text[start : max(start, min(behind, end))]


def _view_texts(pair: Pair, tokenizer: PreTrainedTokenizerBase, predictors: Ids, config: JepaConfig) -> JsonObject:
    """Return the texts of a pair's views, without predictor tokens."""
    ids = [view.content[~np.isin(view.content, predictors)] for view in pair]
    texts = [str(tokenizer.decode(token_ids.tolist(), clean_up_tokenization_spaces=False)) for token_ids in ids]
    source, target = reversed(texts) if config.reverse_pred else texts
    return {"source": source, "target": target}


def _why_left_out(record: Record, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> str:
    """Return the error message for a record that is not trained at all."""
    fault = f"the record has more tokens than max_length {config.max_length}"
    cut = replace(config, over_length="truncate", require_pairs=False)
    if config.over_length == "skip" and RecordTokenizer(tokenizer, cut).tokenize([record]):
        return f"{fault}, and training leaves it out; raise `max_length`, or pass `over_length truncate`"
    does = "refuses it" if config.over_length == "error" else "leaves it out"
    return f"{fault} and no answer in so many: training {does}; raise `max_length`"


def _refusal(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig, lenient: RecordTokenizer
) -> str | None:
    """Return the error of training for records that it refuses; None if it accepts them.

    Args:
        records: those of the whole file.
        tokenizer: with the predictor tokens.
        config: of the run.
        lenient: has tokenised the records without refusing any.
    """
    too_long = config.over_length == "error" and lenient.counts["over length"]
    try:
        if too_long or (config.require_pairs and lenient.counts["without a pair"]):
            RecordTokenizer(tokenizer, config).tokenize_each(records)
        check_usable(lenient, records[0].path)
    except UserError as error:
        return str(error)
    return None


def visible_matrix(inspection: Inspection) -> NDArray[np.bool_]:
    """Return ``[T, T]``: whether the query (dim 0) sees the key (dim 1)."""
    start, end = np.array([(token.start, token.end) for token in inspection.tokens]).T
    place = np.arange(len(start))
    sees: NDArray[np.bool_] = (start[:, None] <= place) & (place <= place[:, None]) & (place[:, None] < end)
    return sees


def token_text(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    """Return the text of the token with id ``index``, with its leading blanks.

    A token that is a part of a character is shown as a replacement mark.
    """
    text = str(tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(index))
    # Vocabularies that mark blanks with U+2581 lose the first one, or all, when a token is decoded alone.
    blanks = len(piece) - len(piece.lstrip("\u2581"))
    return f"{' ' * blanks}{text.lstrip(' ')}" if blanks else text or piece


def _describe_tree(
    parts: Sequence[Sequence[TokenSequence]],
    lines: Sequence[int],
    config: JepaConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[TokenInfo], list[BranchInfo], list[SequenceInfo]]:
    """Pack the sequences of each record (``parts``) into rows, and describe their tokens, branches and sequences."""
    owners = [number for number, part in enumerate(parts) for _ in part]
    everything = [sequence for part in parts for sequence in part]
    rows = pack(
        everything,
        row_length=config.row_length or sum(map(len, everything)),
        groups=None if config.share_prefixes else owners,
        one_each=config.encoding == "rows",
    )
    tokens = _describe_tokens(rows, tokenizer)
    first_of_row = np.concatenate([[0], rows.lengths.cumsum()])  # [R + 1] index of the first token of each row
    width = rows.ids.shape[1]
    paths: list[list[int]] = [(first_of_row[flat // width] + flat % width).tolist() for flat in rows.paths]
    through: list[list[int]] = [[] for _ in tokens]  # the sequences that each token belongs to
    for number, path in enumerate(paths):
        for place in path:
            through[place].append(number)
    sequences = []
    for sequence, name, path, owner in zip(everything, _names(parts), paths, owners, strict=True):
        suffix = "" if len(lines) == 1 else f" of line {lines[owner]}"
        shared = sum(len(through[place]) > 1 for place in path)
        sequences.append(_describe_sequence(sequence, f"{name}{suffix}", path, shared))
        _mark_tokens(tokens, sequence, path, suffix, tokenizer)
    laid_out = list(zip(everything, paths, strict=True))
    return tokens, _describe_branches(tokens, laid_out, through, sequences, first_of_row), sequences


def _describe_tokens(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> list[TokenInfo]:
    """Describe the tokens of all rows, one row after the other, without labels and readouts."""
    tokens: list[TokenInfo] = []
    for row, length in enumerate(rows.lengths.tolist()):
        before = len(tokens)
        columns = (array[row, :length].tolist() for array in (rows.ids, rows.positions, rows.start, rows.end))
        for index, position, start, end in zip(*columns, strict=True):
            text = token_text(tokenizer, index)
            tokens.append(TokenInfo(len(tokens), index, text, position, before + start, before + end))
    return tokens


def _names(parts: Sequence[Sequence[TokenSequence]]) -> Iterator[str]:
    """Yield the name of each sequence of some records: of its pair, or numbered if a record has several of its kind."""
    for part in parts:
        kinds, number = [_kind(sequence) for sequence in part], Counter[str]()
        for sequence, kind in zip(part, kinds, strict=True):
            number[kind] += 1
            if kind in ("source", "target"):
                yield f"{kind} {sequence.readouts[0].pair + 1}"
            else:
                yield f"{kind} {number[kind]}" if kinds.count(kind) > 1 else kind


def _kind(sequence: TokenSequence) -> str:
    """Return the kind of a sequence, see :class:`SequenceInfo`."""
    if len(sequence.text):
        return "main"
    return sequence.readouts[0].kind if sequence.readouts else "other"


def _describe_sequence(sequence: TokenSequence, name: str, path: Sequence[int], shared: int) -> SequenceInfo:
    """Describe a sequence by the places of its tokens; ``shared`` of them belong to other sequences, too."""
    runs = np.split(path, np.flatnonzero(np.diff(path) != 1) + 1)
    ranges = tuple((int(run[0]), int(run[-1]) + 1) for run in runs if len(run))
    return SequenceInfo(name, _kind(sequence), len(path), shared, ranges)


def _mark_tokens(
    tokens: Sequence[TokenInfo],
    sequence: TokenSequence,
    path: Sequence[int],
    suffix: str,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Add the labels and readouts of a sequence to its tokens, in place."""
    for step, label in sequence.labels.tolist():
        tokens[path[step]].labels.append(label)
        tokens[path[step]].label_texts.append(token_text(tokenizer, label))
    for pair, kind, start, end in sequence.readouts:
        mean = f" (mean of {end - start} tokens)" if end - start > 1 else ""
        tokens[path[end - 1]].readouts.append(f"{kind} {pair + 1}{suffix}{mean}")
        tokens[path[end - 1]].averaged.append(end - start)


def _describe_branches(
    tokens: Sequence[TokenInfo],
    laid_out: Sequence[tuple[TokenSequence, Sequence[int]]],
    through: Sequence[Sequence[int]],
    sequences: Sequence[SequenceInfo],
    first_of_row: NDArray[np.int64],
) -> list[BranchInfo]:
    """Group tokens that follow each other in the same sequences into branches, and set the branch of each token.

    Args:
        tokens: those of all rows; changed in place.
        laid_out: each sequence with the places of its tokens.
        through: for each token the numbers of its sequences.
        sequences: the descriptions of these.
        first_of_row: ``[R + 1]`` index of the first token of each row.

    Returns:
        The branches in the order of their tokens.
    """
    behind: list[int | None] = [None] * len(tokens)  # the place of the token before each in its sequences
    inside: list[str | None] = [None] * len(tokens)  # the view of a token that layout 'inplace' has in the main text
    for sequence, path in laid_out:
        for place, before in zip(path, (None, *path), strict=False):
            behind[place] = before
        for place, view in zip(path, _views_inside(sequence), strict=True):
            inside[place] = view or inside[place]
    branches: list[BranchInfo] = []
    for (numbers, view, _), group in groupby(tokens, lambda it: (through[it.place], inside[it.place], it.start)):
        inner = list(group)
        for token in inner:
            token.branch = len(branches)
        first, end = inner[0].place, inner[-1].place + 1
        kind = view or ("shared" if len(numbers) > 1 else sequences[numbers[0]].kind)
        before = behind[first]
        parent = None if before is None else tokens[before].branch
        row = int(first_of_row.searchsorted(first, "right")) - 1
        branches.append(BranchInfo(len(branches), row, kind, tuple(numbers), parent, view == "target", first, end))
    return branches


def _views_inside(sequence: TokenSequence) -> list[str | None]:
    """Return for each token the view that it belongs to inside the main text; None for other tokens."""
    own_text = set(sequence.text.tolist())
    isolated = [False] * len(sequence) if sequence.start is None else (sequence.start > 0).tolist()
    return [
        # Predictor tokens are no part of the record's text.
        "source" if own_text and step not in own_text else "target" if is_isolated else None
        for step, is_isolated in enumerate(isolated)
    ]
