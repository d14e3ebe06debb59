"""Describe the prefix trees of a micro-batch: its tokens, the branches that they form, the sequences through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepjepa.batch.pack import Rows, pack
from stepjepa.config.jepa import JepaConfig
from stepjepa.views.sequences import TokenSequence

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


def token_text(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    """Return the text of the token with id ``index``, with its leading blanks.

    A token that is a part of a character is shown as a replacement mark.
    """
    text = str(tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(index))
    # Vocabularies that mark blanks with U+2581 lose the first one, or all, when a token is decoded alone.
    blanks = len(piece) - len(piece.lstrip("\u2581"))
    return f"{' ' * blanks}{text.lstrip(' ')}" if blanks else text or piece


def describe_tree(
    by_record: Sequence[Sequence[TokenSequence]],
    lines: Sequence[int],
    config: JepaConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[TokenInfo], list[BranchInfo], list[SequenceInfo]]:
    """Pack the sequences of some records into rows, and describe their tokens, branches and sequences.

    Args:
        by_record: the sequences of each record.
        lines: the line of each record in its file.
        config: row length, sharing of prefixes and encoding.
        tokenizer: decodes the tokens.
    """
    owners = [number for number, part in enumerate(by_record) for _ in part]
    sequences = [sequence for part in by_record for sequence in part]
    rows = pack(
        sequences,
        row_length=config.row_length or sum(map(len, sequences)),
        groups=None if config.share_prefixes else owners,
        one_each=config.encoding == "rows",
    )
    tokens = _describe_tokens(rows, tokenizer)
    first_of_row = np.concatenate([[0], rows.lengths.cumsum()])  # [R + 1] index of the first token of each row
    width = rows.ids.shape[1]
    paths: list[list[int]] = [(first_of_row[flat // width] + flat % width).tolist() for flat in rows.paths]
    members: list[list[int]] = [[] for _ in tokens]  # the sequences that each token belongs to
    for number, path in enumerate(paths):
        for place in path:
            members[place].append(number)
    described = []
    for sequence, name, path, owner in zip(sequences, _names(by_record), paths, owners, strict=True):
        suffix = "" if len(lines) == 1 else f" of line {lines[owner]}"
        shared = sum(len(members[place]) > 1 for place in path)
        described.append(_describe_sequence(sequence, f"{name}{suffix}", path, shared))
        _mark_tokens(tokens, sequence, path, suffix, tokenizer)
    laid_out = list(zip(sequences, paths, strict=True))
    return tokens, _describe_branches(tokens, laid_out, members, described, first_of_row), described


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


def _names(by_record: Sequence[Sequence[TokenSequence]]) -> Iterator[str]:
    """Yield the name of each sequence of some records: of its pair, or numbered if a record has several of its kind."""
    for part in by_record:
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
    members: Sequence[Sequence[int]],
    sequences: Sequence[SequenceInfo],
    first_of_row: NDArray[np.int64],
) -> list[BranchInfo]:
    """Group tokens that follow each other in the same sequences into branches, and set the branch of each token.

    Args:
        tokens: those of all rows; changed in place.
        laid_out: each sequence with the places of its tokens.
        members: for each token the numbers of its sequences.
        sequences: the descriptions of these.
        first_of_row: ``[R + 1]`` index of the first token of each row.

    Returns:
        The branches in the order of their tokens.
    """
    previous: list[int | None] = [None] * len(tokens)  # the place of the token before each in its sequences
    view_of: list[str | None] = [None] * len(tokens)  # the view of a token that layout 'inplace' has in the main text
    for sequence, path in laid_out:
        for place, before in zip(path, (None, *path), strict=False):
            previous[place] = before
        for place, view in zip(path, _views_inside(sequence), strict=True):
            view_of[place] = view or view_of[place]
    branches: list[BranchInfo] = []
    for (numbers, view, _), group in groupby(
        tokens, lambda token: (members[token.place], view_of[token.place], token.start)
    ):
        inner = list(group)
        for token in inner:
            token.branch = len(branches)
        first, end = inner[0].place, inner[-1].place + 1
        kind = view or ("shared" if len(numbers) > 1 else sequences[numbers[0]].kind)
        before = previous[first]
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
