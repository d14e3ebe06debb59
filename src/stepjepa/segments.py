"""Records to forests: one tokenisation, character spans to token spans, segments laid out in a row.

No later stage looks for tokens again: labels, positions and readouts are all settled here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.forest import IGNORE, Forest, Kind, Segment
from stepjepa.predictors import predictor_ids, predictor_token
from stepjepa.records import Record
from stepjepa.template import ChatTemplate, Rendered
from stepjepa.views import MessageView, Pair, SpanView, View, find_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int32]

# A message alone in the template, and whether it is a source, which has predictors.
_Alone = tuple[MessageView, bool]


class Tokens(NamedTuple):
    """A text as tokens.

    Attributes:
        ids: ``[L]`` token ids.
        starts: ``[L]`` first character of each token.
        ends: ``[L]`` one past its last character.
    """

    ids: Ids
    starts: Ids
    ends: Ids

    def first_overlapping(self, character: int) -> int:
        """Index of the first token that reaches beyond a character position."""
        return int(np.searchsorted(self.ends, character, side="right"))

    def first_from(self, character: int) -> int:
        """Index of the first token that begins at or after a character position."""
        return int(np.searchsorted(self.starts, character, side="left"))


class _Row:
    """A row under construction."""

    def __init__(self) -> None:
        self.ids: list[Ids] = []
        self.positions: list[Ids] = []
        self.labels: list[Ids] = []
        self.segments: list[Segment] = []
        self.pairs: list[tuple[int, int]] = []
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
        return Forest(
            np.concatenate(self.ids),
            np.concatenate(self.positions),
            np.concatenate(self.labels),
            tuple(self.segments),
            np.asarray(self.pairs, np.int32).reshape(-1, 2),
            line,
        )


class _Located(NamedTuple):
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


class ForestBuilder:
    """Turns records into forests for one tokenizer and one configuration.

    Args:
        tokenizer: fast, with a chat template, predictor tokens added (``predictors.add_predictor_tokens``).
        config: mode, layout, labels, limits.

    Attributes:
        counts: what was met so far: ``records``, ``pairs``, ``without a pair``, ``truncated``, ``over length``,
            ``pairs cut by truncation``, ``skipped``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.template = ChatTemplate(tokenizer)
        self.counts: Counter[str] = Counter()
        assert config.predictors is not None
        wanted = config.predictors if config.uses_views else 0
        self._predictors = np.asarray(predictor_ids(tokenizer, wanted), np.int32)
        self._predictor_text = "".join(predictor_token(number) for number in range(1, wanted + 1))

    def build(self, records: Sequence[Record]) -> list[Forest]:
        """The forests of some records, in order; a skipped record gives none.

        Raises:
            UserError: a record is too long and ``over_length`` is ``error``; it has no pair and ``require_pairs`` is
                set; its template rewrites it. The message names file and line.
        """
        texts: list[str] = []
        found: list[list[Pair]] = []
        alone: list[dict[_Alone, int]] = []
        spans: list[Rendered] = []
        for record in records:
            try:
                whole = self.template.render(record.messages)
            except UserError as error:
                raise UserError(str(error), path=record.path, line=record.line) from None
            pairs = find_pairs(record, self.config)
            texts.append(whole.text)
            spans.append(whole)
            found.append(pairs)
            places: dict[_Alone, int] = {}
            for view, is_source in (end for pair in pairs for end in self._ends(pair)):
                if isinstance(view, MessageView) and (view, is_source) not in places:
                    places[view, is_source] = len(texts)
                    single = self._render_alone(view, is_source)
                    texts.append(single.text)
                    spans.append(single)
            alone.append(places)
        tokens = self.tokenize(texts)
        forests: list[Forest] = []
        cursor = 0
        for record, pairs, places in zip(records, found, alone, strict=True):
            whole = spans[cursor]
            located = {
                key: _locate_alone(tokens[place], spans[place], len(self._predictors) if key[1] else 0)
                for key, place in places.items()
            }
            forest = self._one(record, whole, tokens[cursor], pairs, located)
            cursor += 1 + len(places)
            if forest is not None:
                forests.append(forest)
        return forests

    def _ends(self, pair: Pair) -> tuple[tuple[View, bool], tuple[View, bool]]:
        """The two views of a pair, each with whether it is the source."""
        return (pair.first, not self.config.reverse_pred), (pair.second, self.config.reverse_pred)

    def _render_alone(self, view: MessageView, is_source: bool) -> Rendered:
        """A message alone in the template. A source's predictors are part of the text before it is tokenised.

        Put in afterwards they could come to stand behind a token that the content shares with the template's tail,
        such as OLMo-2's ``?`` with the line end.
        """
        content = view.content
        if is_source:
            added = self._predictor_text
            content = added + content if self.config.front_pred else content + added
        return self.template.render_alone(view.role, content)

    def tokenize(self, texts: list[str]) -> list[Tokens]:
        """Rendered texts as tokens."""
        # The template has written the special tokens; the tokenizer must not add a second begin-of-text.
        batch = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            # Lengths are checked here; the tokenizer's own warning about its model would only confuse.
            verbose=False,
        )
        result = []
        for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
            pairs = np.asarray(offsets, np.int32).reshape(-1, 2)
            result.append(Tokens(np.asarray(ids, np.int32), pairs[:, 0], pairs[:, 1]))
        return result

    def _one(
        self, record: Record, whole: Rendered, tokens: Tokens, pairs: list[Pair], alone: dict[_Alone, _Located]
    ) -> Forest | None:
        limit = self.config.max_length
        length = self._main_length(record, whole, tokens)
        if length > limit:
            self.counts["over length"] += 1
            if self.config.over_length == "error":
                raise UserError(
                    f"the record has {length} tokens, more than max_length {limit}; raise --max_length, or pass "
                    "--over_length truncate or skip",
                    path=record.path,
                    line=record.line,
                )
            if self.config.over_length == "skip":
                self.counts["skipped"] += 1
                return None
            length = limit
            self.counts["truncated"] += 1
        labels = self._shift_labels(record, whole, tokens)[:length]
        if not (labels != IGNORE).any():
            # Only truncation can leave nothing to learn: an empty answer is refused when the file is read.
            self.counts["skipped"] += 1
            return None
        ids = tokens.ids[:length]
        usable = []
        for pair in pairs:
            both = [
                alone[view, is_source]
                if isinstance(view, MessageView)
                else _Located(tokens.ids, *token_span(view, record, whole, tokens), in_main=True)
                for view, is_source in self._ends(pair)
            ]
            if any(view.end - view.predictors > (length if view.in_main else limit) for view in both):
                self.counts["pairs cut by truncation"] += 1
            elif all(view.end - view.predictors > view.start for view in both):
                usable.append((both[0], both[1]))
        self.counts["records"] += 1
        self.counts["pairs"] += len(usable)
        if self.config.uses_views and not usable:
            self.counts["without a pair"] += 1
            if self.config.require_pairs:
                raise UserError(
                    "the record has no usable pair of views (fewer than two steps, an empty view, or cut by "
                    "truncation); check --step_separator and --max_length, or leave --require_pairs out",
                    path=record.path,
                    line=record.line,
                )
        row = _Row()
        if self.config.layout == "inplace":
            self._lay_inplace(row, ids, labels, usable)
        else:
            main = row.add(ids, "main", labels=labels)
            for first, second in usable:
                self._lay_pair(row, main, first, second)
        return row.forest(record.line)

    def _main_length(self, record: Record, whole: Rendered, tokens: Tokens) -> int:
        """Tokens up to the end of the last assistant turn: what the template writes behind it teaches nothing."""
        if self.config.labels == "assistant":
            return tokens.first_from(whole.turn_ends[-1])
        return len(tokens.ids)

    def _shift_labels(self, record: Record, whole: Rendered, tokens: Tokens) -> Ids:
        """``[L]``: what each position must predict; see ``JepaConfig.labels``."""
        targets = np.full(len(tokens.ids), IGNORE, np.int32)
        if self.config.labels == "assistant":
            for message, (start, _), end in zip(record.messages, whole.spans, whole.turn_ends, strict=True):
                if message["role"] == "assistant":
                    taught = slice(tokens.first_overlapping(start), tokens.first_from(end))
                    targets[taught] = tokens.ids[taught]
        else:
            targets[:] = tokens.ids
            if self.config.labels == "reference":
                targets[np.isin(tokens.ids, self.template.end_of_turn_ids)] = IGNORE
        return np.append(targets[1:], np.int32(IGNORE)).astype(np.int32)

    def _lay_pair(self, row: _Row, main: int, first: _Located, second: _Located) -> None:
        if self.config.reverse_pred:
            source = self._lay_root(row, second, "source")
            target = self._read_main(row, main, first.end) if first.in_main else self._lay_root(row, first, "target")
        else:
            source = self._lay_branch(row, main, first) if first.in_main else self._lay_root(row, first, "source")
            target = self._lay_root(row, second, "target")
        row.pairs.append((source, target))

    def _read_main(self, row: _Row, main: int, end: int) -> int:
        """The readout of a view that ends at a token of the main text and needs no tokens of its own."""
        index = end + (-1 if self.config.last_token is None else self.config.last_token)
        if index < 0:
            raise UserError(f"--last_token {self.config.last_token} reaches before the start of a view")
        return row.segments[main].start + index

    def _lay_branch(self, row: _Row, main: int, view: _Located) -> int:
        """Predictors hanging on the main text behind a view (or, in front, before it); returns the readout."""
        attachment = view.start if self.config.front_pred else view.end
        ids = self._predictors
        if self.config.front_pred:
            ids = np.concatenate([ids, view.ids[view.start : view.end]])
        back = -1 if self.config.last_token is None else self.config.last_token
        beginning = row.length
        if len(ids):
            row.add(ids, "source", parent=main, attachment=attachment, position=attachment)
        # A readout further back than the branch is long stands in the main text that the branch hangs on.
        index = len(ids) + back
        if attachment + index < 0:
            raise UserError(f"--last_token {back} reaches before the start of a view; use a number nearer to -1")
        return beginning + index if index >= 0 else row.segments[main].start + attachment + index

    def _lay_root(self, row: _Row, view: _Located, kind: Kind) -> int:
        """A view that sees nothing else, with predictors if it is a source; returns the readout."""
        added = self._predictors if kind == "source" and not view.predictors else self._predictors[:0]
        before, content, tail = view.ids[: view.start], view.ids[view.start : view.end], view.ids[view.end :]
        if view.in_main:
            # A step by itself: neither the chat before it nor what follows.
            before, tail = before[:0], tail[:0]
        if self.config.last_token is None:
            # Nothing behind the readout can change it.
            tail = tail[:0]
        pieces = [before, added, content, tail] if self.config.front_pred else [before, content, added, tail]
        ids = np.concatenate(pieces)
        readout = len(ids) + (-1 if self.config.last_token is None else self.config.last_token)
        if readout < 0:
            raise UserError(
                f"--last_token {self.config.last_token} reaches before the start of a view of {len(ids)} tokens; "
                "use a number nearer to -1"
            )
        beginning = row.length
        row.add(ids[: readout + 1], kind)
        return beginning + readout

    def _lay_inplace(self, row: _Row, ids: Ids, labels: Ids, pairs: list[tuple[_Located, _Located]]) -> None:
        """Predictors inside the row behind each source step, the step they predict seeing only itself.

        The last token of the source step keeps its label, the first token of the next step; predictor positions have
        none. Everything after the last pair sees the whole row.
        """
        parent, done = -1, 0
        targets: list[int] = []

        def append(tokens: Ids, kind: Kind, wanted: Ids | None = None, isolated: bool = False) -> int:
            nonlocal parent
            if len(tokens):
                seen = len(row.segments[parent]) if parent >= 0 else 0
                parent = row.add(
                    tokens, kind, parent=parent, attachment=seen, isolated=isolated, position=row.length, labels=wanted
                )
            return row.length - 1

        sources = []
        for first, second in pairs:
            if done < first.end:
                append(ids[done : first.end], "main", labels[done : first.end])
            sources.append(append(self._predictors, "source"))
            if first.end < second.start:
                append(ids[first.end : second.start], "main", labels[first.end : second.start])
            targets.append(append(ids[second.start : second.end], "target", labels[second.start : second.end], True))
            done = second.end
        append(ids[done:], "main", labels[done:])
        row.pairs.extend(zip(sources, targets, strict=True))


def _locate_alone(tokens: Tokens, rendered: Rendered, predictors: int) -> _Located:
    start, end = rendered.spans[0]
    return _Located(tokens.ids, tokens.first_overlapping(start), tokens.first_from(end), False, predictors)


def token_span(view: SpanView, record: Record, whole: Rendered, tokens: Tokens) -> tuple[int, int]:
    """First and one past the last token of a part of a message, where it stands in the chat.

    Args:
        view: the part.
        record: whose message it is part of.
        whole: the record as the template renders it.
        tokens: that text as tokens.
    """
    start, end = whole.spans[view.message]
    # Templates that trim a content also trim it in front: then its characters stand earlier than the record says.
    trimmed = max(record.messages[view.message]["content"].find(whole.text[start:end]), 0)
    first, last = (min(max(start + place - trimmed, start), end) for place in (view.start, view.end))
    # A token belongs to the step in which it begins, so that a full stop fused with a blank line closes its step;
    # the first step takes the token that reaches into the content from outside.
    begin = tokens.first_overlapping(first) if view.start == 0 else tokens.first_from(first)
    return begin, tokens.first_from(last)
