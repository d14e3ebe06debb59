"""Where views are placed in the row: branches on the main text, roots beside it, or inside it.

All records of a block are laid out together, by arithmetic on arrays. A segment is a chain of pieces, each a run of
tokens in a common store: the tokens of the block's texts, and behind them the predictor tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.forests.flat import KINDS, FlatForests, Ints, as_bounds, expand
from stepjepa.forests.forest import IGNORE

Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_MAIN, _SOURCE, _TARGET = map(KINDS.index, ("main", "source", "target"))


class Located(NamedTuple):
    """Views as tokens; places in the text are counted from the text's first token.

    Attributes:
        text: ``[P]`` where the text that a view stands in begins among all tokens.
        length: ``[P]`` tokens of that text.
        start: ``[P]`` first token of the view's content.
        end: ``[P]`` one past the last token of its content.
        in_main: ``[P]`` the view stands in the main text, where its prefix is there already.
        predictors: ``[P]`` how many of the content's tokens are predictors.
    """

    text: Numbers
    length: Numbers
    start: Numbers
    end: Numbers
    in_main: Flags
    predictors: Numbers

    def take(self, which: Flags | slice) -> Located:
        """Some of the views."""
        return Located._make(values[which] for values in self)


class Mains(NamedTuple):
    """The main texts of records.

    Attributes:
        text: ``[R]`` where each begins among all tokens.
        length: ``[R]`` how many tokens of it are used.
        line: ``[R]`` of the record in its file.
    """

    text: Numbers
    length: Numbers
    line: Numbers


class Pairs(NamedTuple):
    """Pairs of views.

    Attributes:
        owner: ``[P]`` the record of each, ascending.
        first: the views that predict (before ``reverse_pred``).
        second: the views that are predicted.
    """

    owner: Numbers
    first: Located
    second: Located


class Segments(NamedTuple):
    """Segments of many records.

    Attributes:
        owner: ``[S]`` the record that each belongs to.
        begins: ``[S, 4]`` where its pieces begin in the store.
        lengths: ``[S, 4]`` how long they are; a segment of no tokens is left out in the end.
        kind: ``[S]`` index into ``flat.KINDS``.
        parent: ``[S]`` index of the parent among the record's segments; -1 for a root.
        attachment: ``[S]`` tokens of the parent that are seen.
        isolated: ``[S]`` 1 for one that sees nothing of its parent, see ``forest.Segment``.
        position: ``[S]`` position of its first token.
    """

    owner: Numbers
    begins: Numbers
    lengths: Numbers
    kind: Numbers
    parent: Numbers
    attachment: Numbers
    isolated: Numbers
    position: Numbers

    def take(self, which: Numbers) -> Segments:
        """Some of the segments, in that order."""
        return Segments._make(values[which] for values in self)


class Readouts(NamedTuple):
    """Where embeddings are read.

    Attributes:
        place: ``[P]`` the last token of those that are averaged, counted from the first of the view's own segment or,
            where it has none, of the row.
        own: ``[P]`` whether it stands in the view's own segment.
        pooled: ``[P]`` how many tokens are averaged, this one included.
    """

    place: Numbers
    own: Flags
    pooled: Numbers


# Segments in the order of rows, and for sources and for targets the rows' readouts and how many tokens they average.
_Laid = tuple[Segments, tuple[Numbers, Numbers], tuple[Numbers, Numbers]]


class Placing:
    """Places the views of records, by one configuration.

    Args:
        config: layout and readouts.
        predictors: ``[K]`` ids of the predictor tokens.
    """

    def __init__(self, config: JepaConfig, predictors: Ids) -> None:
        self._config = config
        self._predictors = predictors
        self._back = -1 if config.last_token is None else config.last_token

    def lay(self, ids: Ids, labels: Ids, mains: Mains, pairs: Pairs) -> FlatForests:
        """Lay out records.

        Args:
            ids: ``[N]`` the tokens of all texts.
            labels: ``[N]`` what the positions of main texts must predict.
            mains: the ``R`` records.
            pairs: their ``P`` pairs.

        Raises:
            UserError: ``last_token`` reaches before the start of a view.
        """
        records = len(mains.text)
        lay = self._lay_inplace if self._config.layout == "inplace" else self._lay_beside
        segments, places, pooled = lay(len(ids), mains, *pairs)
        sizes = segments.lengths.sum(1)
        starts = _starts(segments.owner, sizes, records)
        source = expand(segments.begins.ravel(), segments.lengths.ravel())
        # A view that is laid out beside the text has its tokens, but none of its labels.
        is_text = (segments.kind == _MAIN) | ((segments.kind == _TARGET) & (segments.parent >= 0))
        wanted = np.concatenate([labels, np.full(len(self._predictors), IGNORE, np.int32)])[source]
        wanted[np.repeat(~is_text, sizes)] = IGNORE
        table = (starts, starts + sizes, segments.kind, segments.parent, segments.attachment, segments.isolated)
        return FlatForests(
            {
                "input_ids": np.concatenate([ids, self._predictors])[source],
                "position_ids": expand(segments.position, sizes).astype(np.int32),
                "shift_labels": wanted,
                "segments": np.stack(table, axis=1).astype(np.int32),
                "pairs": np.stack(places, axis=1).astype(np.int32),
                "pooled": np.stack(pooled, axis=1).astype(np.int32),
                "lines": mains.line,
                "token_bounds": as_bounds(_totals(segments.owner, sizes, records)),
                "segment_bounds": as_bounds(np.bincount(segments.owner, minlength=records)),
                "pair_bounds": as_bounds(np.bincount(pairs.owner, minlength=records)),
            }
        )

    def _pooled(self, content: Numbers, predictors: Numbers) -> Numbers:
        """How many tokens are averaged for views of so many tokens with so many predictors behind or before them."""
        if self._config.pooling != "mean":
            return np.ones_like(content)
        return content if self._config.front_pred else np.where(predictors > 0, predictors, content)

    # -- views beside the main text ------------------------------------------------------------------------------------

    def _lay_beside(self, store: int, mains: Mains, owner: Numbers, first: Located, second: Located) -> _Laid:
        """Each main text, then for each of its pairs the source and the target."""
        records, pairs = len(mains.text), len(owner)
        if self._config.reverse_pred:
            source, read_source = self._lay_roots(store, owner, second, _SOURCE)
            target, read_target = self._read_mains(*self._lay_roots(store, owner, first, _TARGET), first)
        else:
            source, read_source = self._lay_branches(*self._lay_roots(store, owner, first, _SOURCE), store, first)
            target, read_target = self._lay_roots(store, owner, second, _TARGET)
        readouts = (read_source, read_target)
        if any((read.place < 0).any() for read in readouts):
            raise UserError(f"--last_token {self._back} reaches before the start of a view; use a number nearer to -1")
        main = _as_segments(np.arange(records), mains.text, mains.length, _MAIN)
        segments = _joined(main, _by_turns([source, target]))
        order = _row_order(segments)
        laid = segments.take(order)
        starts = np.zeros(len(segments.owner), np.int64)
        starts[order] = _starts(laid.owner, laid.lengths.sum(1), records)
        own = starts[records:].reshape(pairs, 2)
        source_place, target_place = (np.where(r.own, own[:, i], 0) + r.place for i, r in enumerate(readouts))
        return laid, (source_place, target_place), (read_source.pooled, read_target.pooled)

    def _lay_roots(self, store: int, owner: Numbers, view: Located, kind: int) -> tuple[Segments, Readouts]:
        """Views that see nothing else, with predictors if they are sources."""
        content = view.end - view.start
        none = np.zeros_like(content)
        added = np.where(view.predictors > 0, 0, len(self._predictors)) if kind == _SOURCE else none
        # A step by itself: neither the chat before it nor what follows.
        before = np.where(view.in_main, 0, view.start)
        # Nothing behind the readout can change it.
        tail = none if self._config.last_token is None else np.where(view.in_main, 0, view.length - view.end)
        middle = [(view.text + view.start, content), (none + store, added)]
        if self._config.front_pred:
            middle.reverse()
        pieces = [(view.text, before), *middle, (view.text + view.end, tail)]
        begins, lengths = (np.stack(each, axis=1) for each in zip(*pieces, strict=True))
        ends = lengths.cumsum(1)
        place = ends[:, -1] + self._back
        lengths = np.clip(place[:, None] + 1 - (ends - lengths), 0, lengths)
        read = Readouts(place, none == 0, self._pooled(content - view.predictors, added + view.predictors))
        return Segments(owner, begins, lengths, none + kind, none - 1, none, none, none), read

    def _lay_branches(self, roots: Segments, read: Readouts, store: int, view: Located) -> tuple[Segments, Readouts]:
        """In the place of roots, for views in the main text: predictors that hang on it behind (or before) the view."""
        front, content = self._config.front_pred, view.end - view.start
        none = np.zeros_like(content)
        count = none + len(self._predictors)
        attachment = view.start if front else view.end
        begins = np.stack([none + store, view.text + view.start, none, none], axis=1)
        lengths = np.stack([count, content if front else none, none, none], axis=1)
        branches = Segments(roots.owner, begins, lengths, roots.kind, none, attachment, none, attachment)
        # A readout further back than the branch is long stands in the main text that the branch hangs on.
        index = lengths.sum(1) + self._back
        place = np.where(index >= 0, index, attachment + index)
        found = Readouts(place, index >= 0, self._pooled(content, count))
        return Segments._make(_where(view.in_main, branches, roots)), Readouts._make(_where(view.in_main, found, read))

    def _read_mains(self, roots: Segments, read: Readouts, view: Located) -> tuple[Segments, Readouts]:
        """In the place of roots, for views in the main text: readouts there, with no tokens of their own."""
        none = np.zeros_like(view.end)
        pooled = self._pooled(view.end - view.start, none)
        kept = roots._replace(lengths=np.where(view.in_main[:, None], 0, roots.lengths))
        return kept, Readouts(*_where(view.in_main, Readouts(view.end + self._back, none > 0, pooled), read))

    # -- views inside the main text ------------------------------------------------------------------------------------

    def _lay_inplace(self, store: int, mains: Mains, owner: Numbers, first: Located, second: Located) -> _Laid:
        """Predictors inside the row behind each source step, the step they predict seeing only itself.

        The last token of the source step keeps its label, the first token of the next step; predictor positions have
        none. Everything after the last pair sees the whole row.
        """
        records, pairs = len(mains.text), len(owner)
        # How far the text of a record is laid out before each of its pairs, and before what follows the last.
        done = np.zeros(pairs, np.int64)
        done[1:] = np.where(owner[1:] == owner[:-1], second.end[:-1], 0)
        rest = np.zeros(records, np.int64)
        rest[owner] = second.end
        text, count = first.text, np.full(pairs, len(self._predictors))
        parts = [
            _as_segments(owner, text + done, first.end - done, _MAIN),
            _as_segments(owner, np.full(pairs, store), count, _SOURCE),
            _as_segments(owner, text + first.end, second.start - first.end, _MAIN),
            _as_segments(owner, text + second.start, second.end - second.start, _TARGET, isolated=1),
        ]
        within = _by_turns(parts)
        sizes = within.lengths.sum(1)
        ends = (_starts(within.owner, sizes, records) + sizes).reshape(pairs, 4)
        last = _as_segments(np.arange(records), mains.text + rest, mains.length - rest, _MAIN)
        segments = _joined(within, last)
        segments = segments.take(_row_order(segments))
        sizes = segments.lengths.sum(1)
        # Each hangs on all of the one before it.
        number = expand(np.zeros(records, np.int64), np.bincount(segments.owner, minlength=records))
        attachment = np.where(number > 0, np.concatenate([[0], sizes[:-1]]), 0)
        position = _starts(segments.owner, sizes, records)
        segments = segments._replace(parent=number - 1, attachment=attachment, position=position)
        pooled = self._pooled(first.end - first.start, count), self._pooled(second.end - second.start, 0 * count)
        return segments, (ends[:, 1] - 1, ends[:, 3] - 1), pooled


def _totals(owner: Numbers, sizes: Numbers, records: int) -> Numbers:
    """``[R]``: tokens of each record."""
    found = np.zeros(records, np.int64)
    np.add.at(found, owner, sizes)
    return found


def _starts(owner: Numbers, sizes: Numbers, records: int) -> Numbers:
    """``[S]``: where in its row each segment begins, of segments in the order of rows."""
    rows = as_bounds(_totals(owner, sizes, records))[:-1]
    return sizes.cumsum() - sizes - rows[owner]


def _row_order(segments: Segments) -> Numbers:
    """The segments that have tokens, those of a record together, otherwise in the order in which they are."""
    there = np.flatnonzero(segments.lengths.any(1))
    return there[np.argsort(segments.owner[there], kind="stable")]


def _as_segments(owner: Numbers, begins: Numbers, lengths: Numbers, kind: int, *, isolated: int = 0) -> Segments:
    """Roots of one piece each; nothing where a length is negative."""
    none = np.zeros_like(owner)
    fill = np.zeros((len(owner), 3), np.int64)
    pieces = [np.column_stack([each, fill]) for each in (begins, np.maximum(lengths, 0))]
    return Segments(owner, pieces[0], pieces[1], none + kind, none - 1, none, none + isolated, none)


def _by_turns(parts: Sequence[Segments]) -> Segments:
    """The first of each, the second of each, and so on."""
    count = len(parts) * len(parts[0].owner)
    return Segments._make(
        np.stack(each, axis=1).reshape(count, *each[0].shape[1:]) for each in zip(*parts, strict=True)
    )


def _joined(one: Segments, other: Segments) -> Segments:
    return Segments._make(map(np.concatenate, zip(one, other, strict=True)))


def _where(chosen: Flags, one: Sequence[Ints], other: Sequence[Ints]) -> list[Ints]:
    """Array by array the rows of one where they are chosen, else those of the other."""
    both = zip(one, other, strict=True)
    return [np.where(chosen if a.ndim == 1 else chosen[:, None], a, b) for a, b in both]
