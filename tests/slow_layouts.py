"""Views placed one after the other: what ``forests.layouts``, which places many at once, is held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.forests.forest import IGNORE, Forest, Kind, Segment

Ids = NDArray[np.int32]


class Readout(NamedTuple):
    """Where an embedding is read.

    Attributes:
        place: index in the row; the last token of those that are averaged.
        pooled: how many tokens are averaged, this one included.
    """

    place: int
    pooled: int


class Located(NamedTuple):
    """A view as tokens: ``ids[:end]`` up to the end of its content, which begins at ``start``.

    Attributes:
        ids: all tokens of the text that the view stands in, up to the template's tail behind it.
        start: first token of the content.
        end: one past the last token of the content.
        in_main: the view stands in the main text, where its prefix is there already.
        predictors: how many of the content's tokens are predictors.
    """

    ids: Ids
    start: int
    end: int
    in_main: bool
    predictors: int = 0


class Row:
    """A row under construction."""

    def __init__(self) -> None:
        self.ids: list[Ids] = []
        self.positions: list[Ids] = []
        self.labels: list[Ids] = []
        self.segments: list[Segment] = []
        self.pairs: list[tuple[Readout, Readout]] = []
        self.length = 0

    def add(
        self,
        ids: Ids,
        kind: Kind,
        *,
        parent: int = -1,
        attachment: int = 0,
        isolated: bool = False,
        position: int = 0,
        labels: Ids | None = None,
    ) -> int:
        """Append a segment; returns its index."""
        self.ids.append(ids)
        self.positions.append(np.arange(position, position + len(ids), dtype=np.int32))
        self.labels.append(np.full(len(ids), IGNORE, np.int32) if labels is None else labels)
        self.segments.append(Segment(self.length, self.length + len(ids), kind, parent, attachment, isolated))
        self.length += len(ids)
        return len(self.segments) - 1

    def forest(self, line: int) -> Forest:
        """The finished row."""
        pairs = np.asarray(self.pairs, np.int32).reshape(-1, 2, 2)
        return Forest(
            np.concatenate(self.ids),
            np.concatenate(self.positions),
            np.concatenate(self.labels),
            tuple(self.segments),
            pairs[:, :, 0],
            line,
            pairs[:, :, 1],
        )


class SlowPlacing:
    """Places the views of one record after another, by one configuration.

    Args:
        config: layout and readouts.
        predictors: ``[K]`` ids of the predictor tokens.
    """

    def __init__(self, config: JepaConfig, predictors: Ids) -> None:
        self._config = config
        self._predictors = predictors
        self._mean = config.pooling == "mean"

    def forest(self, ids: Ids, labels: Ids, pairs: Sequence[tuple[Located, Located]], line: int) -> Forest:
        """Lay out a record.

        Args:
            ids: ``[L]`` the main text.
            labels: ``[L]`` what each of its positions must predict.
            pairs: its pairs of views; the first predicts the second (before ``reverse_pred``).
            line: of the record in its file.

        Raises:
            UserError: ``last_token`` reaches before the start of a view.
        """
        row = Row()
        if self._config.layout == "inplace":
            self._lay_inplace(row, ids, labels, pairs)
        else:
            main = row.add(ids, "main", labels=labels)
            row.pairs.extend(self._lay_pair(row, main, first, second) for first, second in pairs)
        return row.forest(line)

    def _lay_pair(self, row: Row, main: int, first: Located, second: Located) -> tuple[Readout, Readout]:
        if self._config.reverse_pred:
            source = self._lay_root(row, second, "source")
            target = self._read_main(row, main, first) if first.in_main else self._lay_root(row, first, "target")
        else:
            source = self._lay_branch(row, main, first) if first.in_main else self._lay_root(row, first, "source")
            target = self._lay_root(row, second, "target")
        return source, target

    def _back(self) -> int:
        return -1 if self._config.last_token is None else self._config.last_token

    def _pooled(self, content: int, predictors: int) -> int:
        """How many tokens are averaged for a view of so many tokens with so many predictors behind or before it."""
        if not self._mean:
            return 1
        return content if self._config.front_pred or not predictors else predictors

    def _read_main(self, row: Row, main: int, view: Located) -> Readout:
        """The readout of a view that ends at a token of the main text and needs no tokens of its own."""
        index = view.end + self._back()
        if index < 0:
            raise _too_far(self._back())
        return Readout(row.segments[main].start + index, self._pooled(view.end - view.start, 0))

    def _lay_branch(self, row: Row, main: int, view: Located) -> Readout:
        """Predictors hanging on the main text behind a view (or, in front, before it)."""
        attachment = view.start if self._config.front_pred else view.end
        ids = self._predictors
        if self._config.front_pred:
            ids = np.concatenate([ids, view.ids[view.start : view.end]])
        beginning = row.length
        if len(ids):
            row.add(ids, "source", parent=main, attachment=attachment, position=attachment)
        # A readout further back than the branch is long stands in the main text that the branch hangs on.
        index = len(ids) + self._back()
        if attachment + index < 0:
            raise _too_far(self._back())
        place = beginning + index if index >= 0 else row.segments[main].start + attachment + index
        return Readout(place, self._pooled(view.end - view.start, len(self._predictors)))

    def _lay_root(self, row: Row, view: Located, kind: Kind) -> Readout:
        """A view that sees nothing else, with predictors if it is a source."""
        added = self._predictors if kind == "source" and not view.predictors else self._predictors[:0]
        before, content, tail = view.ids[: view.start], view.ids[view.start : view.end], view.ids[view.end :]
        if view.in_main:
            # A step by itself: neither the chat before it nor what follows.
            before, tail = before[:0], tail[:0]
        if self._config.last_token is None:
            # Nothing behind the readout can change it.
            tail = tail[:0]
        pieces = [before, added, content, tail] if self._config.front_pred else [before, content, added, tail]
        ids = np.concatenate(pieces)
        readout = len(ids) + self._back()
        if readout < 0:
            raise _too_far(self._back())
        beginning = row.length
        row.add(ids[: readout + 1], kind)
        predictors = len(added) + view.predictors
        return Readout(beginning + readout, self._pooled(len(content) - view.predictors, predictors))

    def _lay_inplace(self, row: Row, ids: Ids, labels: Ids, pairs: Sequence[tuple[Located, Located]]) -> None:
        """Predictors inside the row behind each source step, the step they predict seeing only itself.

        The last token of the source step keeps its label, the first token of the next step; predictor positions have
        none. Everything after the last pair sees the whole row.
        """
        parent, done = -1, 0

        def append(tokens: Ids, kind: Kind, wanted: Ids | None = None, isolated: bool = False) -> int:
            nonlocal parent
            if len(tokens):
                seen = len(row.segments[parent]) if parent >= 0 else 0
                parent = row.add(
                    tokens, kind, parent=parent, attachment=seen, isolated=isolated, position=row.length, labels=wanted
                )
            return row.length - 1

        for first, second in pairs:
            if done < first.end:
                append(ids[done : first.end], "main", labels[done : first.end])
            source = append(self._predictors, "source")
            if first.end < second.start:
                append(ids[first.end : second.start], "main", labels[first.end : second.start])
            target = append(ids[second.start : second.end], "target", labels[second.start : second.end], True)
            done = second.end
            read = Readout(source, self._pooled(first.end - first.start, len(self._predictors)))
            row.pairs.append((read, Readout(target, self._pooled(second.end - second.start, 0))))
        append(ids[done:], "main", labels[done:])


def _too_far(last_token: int) -> UserError:
    return UserError(f"--last_token {last_token} reaches before the start of a view; use a number nearer to -1")
