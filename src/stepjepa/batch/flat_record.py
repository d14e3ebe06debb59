"""The form in which a tokenised record is stored: one int32 array, of its main texts one after the other.

A main text is stored as a header of six numbers, four parts and the texts of its views::

    line, lengths of the four parts, length of the texts of its views   # the header
    ids, labels, prompt labels, table of views                          # the parts
    the texts of the views that are not in the main text

The table has four numbers for each view, two views for each pair: the length of the view's text (-1 for a view in the
main text), start, end, and number of predictor tokens.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepjepa.views.sequences import Ids, Numbers, Pair, TokenizedRecord, View

_HEADER = 6  # numbers in a header
_PER_PAIR = 8  # numbers of a pair in the table of views
_SEPARATOR = -1  # stands between main texts that are hashed; it is the id of no token


def flattened(record: TokenizedRecord) -> Ids:
    """Return the array of a record."""
    return np.concatenate([_flat_text(text) for text in record.texts])


def _flat_text(text: TokenizedRecord) -> Ids:
    """Return the array of a main text."""
    views = [view for pair in text.pairs for view in pair]
    table = [(-1 if view.in_main else len(view.ids), view.start, view.end, view.predictors) for view in views]
    parts = [text.ids, text.labels, text.prompt, np.array(table, np.int32).ravel()]
    alone = [view.ids for view in views if not view.in_main]
    header = np.array([text.line, *map(len, parts), sum(map(len, alone))], np.int32)
    return np.concatenate([header, *parts, *alone])


def unflattened(flat: Ids) -> TokenizedRecord:
    """Return the record of an array; its ids and labels are views into the array."""
    texts, begin = list[TokenizedRecord](), 0
    while begin < len(flat):
        line, *sizes, _ = flat[begin : begin + _HEADER].tolist()
        *starts, begin = (begin + _HEADER + np.cumsum([0, *sizes])).tolist()
        ids, labels, prompt, table = (flat[start:end] for start, end in pairwise([*starts, begin]))
        views = []
        for length, start, end, predictors in table.reshape(-1, 4).tolist():
            text = ids if length < 0 else flat[begin : begin + length]
            views.append(View(text, start, end, length < 0, predictors))
            begin += max(length, 0)
        texts.append(TokenizedRecord(ids, labels, prompt, tuple(map(Pair, views[::2], views[1::2])), line))
    return replace(texts[0], further=tuple(texts[1:])) if len(texts) > 1 else texts[0]


def prompt_of(flat: Ids) -> Ids:
    """Return the prompt of a record: the tokens of its first text up to the first trained one.

    If the user's message is trained, too, the prompt ends with it.
    """
    ends = _HEADER + np.cumsum(flat[1 : _HEADER - 2])
    ids, labels, prompt_labels = flat[_HEADER : ends[0]], flat[ends[0] : ends[1]], flat[ends[1] : ends[2]]
    if len(prompt_labels) and prompt_labels[0] >= labels[0]:
        # The user's first message ends at the first gap between its positions.
        breaks = np.flatnonzero(np.diff(prompt_labels) > 1)
        return ids[: int(prompt_labels[breaks[0] if len(breaks) else -1]) + 2]
    return ids[: int(labels[0]) + 1]


# -- many records at once ----------------------------------------------------------------------------------------------


def longest_possible(sizes: NDArray[np.integer], predictors: int) -> Numbers:
    """Return a length for each record that no sequence of it exceeds, whatever the layout of this package.

    A sequence has the tokens of one text at most, which the array holds, and ``predictors`` tokens for each pair.

    Args:
        sizes: ``[records]`` number of elements of each record's array.
        predictors: K, the number of predictor tokens.
    """
    return np.asarray(sizes + predictors * (sizes // _PER_PAIR), np.int64)


def text_starts(flat: Ids, first: NDArray[np.integer], last: NDArray[np.integer]) -> Numbers:
    """Return where the header of every main text begins, in the arrays of several records one after the other.

    Args:
        flat: the arrays.
        first: ``[records]`` where the array of each record begins.
        last: ``[records]`` where it ends.

    Returns:
        The first texts of all records, then the second ones of the records that have two, and so on.
    """
    starts = [np.asarray(first, np.int64)]
    while len(starts[-1]):
        after = starts[-1] + _HEADER + sum(flat[starts[-1] + place] for place in range(1, _HEADER))
        has_more = after < last
        starts.append(after[has_more])
        last = last[has_more]
    return np.concatenate(starts)


def main_texts(flat: Ids, starts: Numbers) -> Ids:
    """Return the token ids of all main texts in the order in which they are stored, each behind a separator.

    Args:
        flat: the arrays of several records one after the other.
        starts: of :func:`text_starts`.
    """
    begin = starts + _HEADER
    # From the last number of each header on, which the separator replaces.
    steps = np.zeros(len(flat) + 1, np.int8)
    steps[begin - 1] += 1
    steps[begin + flat[starts + 1]] -= 1
    separated = flat.copy()
    separated[begin - 1] = _SEPARATOR
    chosen: Ids = separated[np.cumsum(steps[:-1]).astype(bool)]
    return chosen


def without_lines(flat: Ids, starts: Numbers) -> Ids:
    """Return the arrays with 0 in place of the records' line numbers; arguments as for :func:`main_texts`."""
    changed = flat.copy()
    changed[starts] = 0
    return changed
