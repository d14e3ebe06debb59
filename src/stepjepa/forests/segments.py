"""Records to forests: one tokenisation, character spans to token spans, segments laid out in a row.

No later stage looks for tokens again: labels, positions and readouts are all settled here. What is done for each
record by itself is to write its texts and to note characters; all that follows is done for many at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.flat import FlatForests, as_bounds, expand
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.layouts import Ids, Located, Mains, Numbers, Pairs, Placing
from stepjepa.forests.tokenisation import Encoded, TextEncoder, Tokens
from stepjepa.forests.views import MessageView, SpanView, find_pairs
from stepjepa.text.frames import Rendered
from stepjepa.text.plain_template import PlainTemplate
from stepjepa.text.predictors import predictor_ids, predictor_token
from stepjepa.text.special import Spans
from stepjepa.text.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Noted(NamedTuple):
    """A view as characters.

    Attributes:
        text: number of the text that it stands in.
        start: its first character there.
        inclusive: the token that holds the first character is part of it even if it begins before.
        end: one past its last character.
        in_main: it stands in the main text.
        predictors: tokens of its content that are predictors.
    """

    text: int
    start: int
    inclusive: bool
    end: int
    in_main: bool
    predictors: int


class _Texts:
    """What is noted of records before their texts are tokenised.

    Attributes:
        texts: all of them.
        contents: where each of them holds what the records say, and not the template.
        mains: ``[R]`` number of each record's main text.
        lines: ``[R]`` of the records.
        turn_ends: ``[R]`` one past the last character of the last assistant turn.
        taught: number of a text, first and one past the last character of what is taught in it.
        owners: ``[P]`` the record of each pair.
        views: ``[P * 2]`` both views of each pair, the first first.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.contents: list[Spans] = []
        self.mains: list[int] = []
        self.lines: list[int] = []
        self.turn_ends: list[int] = []
        self.taught: list[tuple[int, int, int]] = []
        self.owners: list[int] = []
        self.views: list[_Noted] = []


class ForestBuilder:
    """Turns records into forests for one tokenizer and one configuration.

    Args:
        tokenizer: fast, with a chat template or, for ``plain``, its tokens (``plain_template.add_plain_tokens``);
            predictor tokens added (``predictors.add_predictor_tokens``).
        config: mode, layout, labels, limits.

    Attributes:
        counts: what was met so far: ``records``, ``pairs``, ``without a pair``, ``truncated``, ``over length``,
            ``pairs cut by truncation``, ``skipped``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.template = (
            PlainTemplate(tokenizer, answers=config.labels != "all") if config.plain else ChatTemplate(tokenizer)
        )
        self.counts: Counter[str] = Counter()
        self._reverse = config.reverse_pred
        self._encoder = TextEncoder(tokenizer)
        assert config.predictors is not None
        wanted = config.predictors if config.uses_views else 0
        self._predictors = np.asarray(predictor_ids(tokenizer, wanted), np.int32)
        self._placing = Placing(config, self._predictors)
        self._predictor_text = "".join(predictor_token(number) for number in range(1, wanted + 1))

    def build(self, records: Sequence[Record]) -> list[Forest]:
        """The forests of some records, in order; a skipped record gives none. Each has arrays of its own.

        Raises:
            UserError: see :meth:`build_flat`.
        """
        return [forest.copy() for forest in self.build_flat(records)]

    def build_flat(self, records: Sequence[Record]) -> FlatForests:
        """The same in shared arrays that can't be written to.

        Raises:
            UserError: a record is too long and ``over_length`` is ``error``; it has no pair and ``require_pairs`` is
                set; its template rewrites it. The message names file and line.
        """
        noted = _Texts()
        for record in records:
            self._note(noted, record)
        tokens = self._encoder.encode(noted.texts, noted.contents)
        return self._lay(noted, tokens, records)

    def _note(self, noted: _Texts, record: Record) -> None:
        """Write the texts of a record, and note where in them its views and its taught parts stand."""
        try:
            whole = self.template.render(record.messages)
        except UserError as error:
            raise UserError(str(error), path=record.path, line=record.line) from None
        main, number = len(noted.texts), len(noted.mains)
        noted.texts.append(whole.text)
        noted.contents.append(whole.spans)
        noted.mains.append(main)
        noted.lines.append(record.line)
        noted.turn_ends.append(whole.turn_ends[-1])
        for message, (start, _), end in zip(record.messages, whole.spans, whole.turn_ends, strict=True):
            if message["role"] == "assistant":
                noted.taught.append((main, start, end))
        pairs = find_pairs(record, self.config)
        inside = [view for pair in pairs for view in pair if isinstance(view, SpanView)]
        places = iter(characters(inside, record, whole))
        for first, second in pairs:
            noted.owners.append(number)
            for view, is_source in ((first, not self._reverse), (second, self._reverse)):
                if isinstance(view, MessageView):
                    alone = self._render_alone(view, is_source)
                    start, end = alone.spans[0]
                    predictors = len(self._predictors) if is_source else 0
                    noted.views.append(_Noted(len(noted.texts), start, True, end, False, predictors))
                    noted.texts.append(alone.text)
                    noted.contents.append([self._without_predictors(start, end) if is_source else (start, end)])
                else:
                    start, end = next(places)
                    noted.views.append(_Noted(main, start, view.start == 0, end, True, 0))

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

    def _without_predictors(self, start: int, end: int) -> tuple[int, int]:
        """What of the content of a source is the record's own."""
        added = len(self._predictor_text)
        return (start + added, end) if self.config.front_pred else (start, end - added)

    def tokenize(self, whole: Rendered) -> Tokens:
        """A rendered chat as tokens."""
        return self._encoder.encode([whole.text], [whole.spans]).text(0)

    def _lay(self, noted: _Texts, tokens: Encoded, records: Sequence[Record]) -> FlatForests:
        config, starts = self.config, tokens.bounds[:-1]
        main = np.asarray(noted.mains, np.int64)
        whole = self._main_lengths(noted, tokens)
        length = np.minimum(whole, config.max_length)
        long = whole > config.max_length
        too_long = long & (config.over_length == "error")
        labels = self._shift_labels(noted, tokens)
        # Only truncation can leave nothing to learn: an empty answer is refused when the file is read.
        taught = as_bounds(labels != IGNORE)
        kept = taught[starts[main] + length] > taught[starts[main]]
        if config.over_length == "skip":
            kept &= ~long
        owner = np.asarray(noted.owners, np.int64)
        first, second = self._locate(noted, tokens)
        limit = length[owner]
        cut, filled = np.zeros(len(owner), bool), np.ones(len(owner), bool)
        for view in (first, second):
            content = view.end - view.predictors
            cut |= content > np.where(view.in_main, limit, config.max_length)
            filled &= content > view.start
        usable = filled & ~cut & kept[owner]
        lonely = kept & (np.bincount(owner[usable], minlength=len(main)) == 0) & config.uses_views
        # What is wrong with a record is said of the first such record; one before it may be refused for its readouts.
        wrong = too_long | (lonely & config.require_pairs)
        stop = int(wrong.argmax()) if wrong.any() else len(main)
        kept[stop:] = False
        usable &= owner < stop
        forests = self._placing.lay(
            tokens.ids,
            labels,
            Mains(starts[main[kept]], length[kept], np.asarray(noted.lines, np.int64)[kept]),
            Pairs((kept.cumsum() - 1)[owner[usable]], first.take(usable), second.take(usable)),
        )
        if stop < len(main):
            self._refuse(records[stop], int(whole[stop]) if too_long[stop] else None)
        self.counts.update(
            {
                "over length": int(long.sum()),
                "truncated": int(long.sum()) if config.over_length == "truncate" else 0,
                "skipped": int((~kept).sum()),
                "pairs cut by truncation": int((cut & kept[owner]).sum()),
                "records": int(kept.sum()),
                "pairs": int(usable.sum()),
                "without a pair": int(lonely.sum()),
            }
        )
        return forests

    def _refuse(self, record: Record, length: int | None) -> None:
        """Say what is wrong with a record: its length, or else that it has no pair."""
        if length is not None:
            raise UserError(
                f"the record has {length} tokens, more than max_length {self.config.max_length}; raise --max_length, "
                "or pass --over_length truncate or skip",
                path=record.path,
                line=record.line,
            )
        raise UserError(
            "the record has no usable pair of views (fewer than two steps, an empty view, or cut by truncation); "
            "check --step_separator and --max_length, or leave --require_pairs out",
            path=record.path,
            line=record.line,
        )

    def _main_lengths(self, noted: _Texts, tokens: Encoded) -> Numbers:
        """``[R]``: tokens up to the end of the last assistant turn; what the template writes behind teaches nothing."""
        main = np.asarray(noted.mains, np.int64)
        if self.config.labels == "assistant":
            return tokens.first_from(main, np.asarray(noted.turn_ends, np.int64))
        return np.diff(tokens.bounds)[main]

    def _shift_labels(self, noted: _Texts, tokens: Encoded) -> Ids:
        """``[N]``: what each position must predict, sound for main texts; see ``JepaConfig.labels``."""
        labels = np.full(len(tokens.ids), IGNORE, np.int32)
        if self.config.labels == "assistant":
            text, start, end = _columns(noted.taught, 3)
            # Nothing predicts the first token of a row.
            first = np.maximum(tokens.first_overlapping(text, start), 1)
            places = expand(tokens.bounds[text] + first, np.maximum(tokens.first_from(text, end) - first, 0))
            labels[places - 1] = tokens.ids[places]
            return labels
        labels[:-1] = tokens.ids[1:]
        # The last token of a text predicts nothing of the next.
        labels[tokens.bounds[1:][np.diff(tokens.bounds) > 0] - 1] = IGNORE
        if self.config.labels == "reference":
            labels[np.isin(labels, self.template.end_of_turn_ids)] = IGNORE
        return labels

    def _locate(self, noted: _Texts, tokens: Encoded) -> tuple[Located, Located]:
        """The first and the second views of all pairs as tokens."""
        text, start, inclusive, end, in_main, predictors = _columns(noted.views, 6)
        begin = np.where(inclusive > 0, tokens.first_overlapping(text, start), tokens.first_from(text, start))
        found = Located(
            tokens.bounds[text],
            np.diff(tokens.bounds)[text],
            begin,
            tokens.first_from(text, end),
            in_main > 0,
            predictors,
        )
        return found.take(slice(0, None, 2)), found.take(slice(1, None, 2))


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> Numbers:
    """``[width, len(rows)]``."""
    values = np.fromiter(chain.from_iterable(rows), np.int64, width * len(rows))
    return np.ascontiguousarray(values.reshape(-1, width).T)


def characters(views: Sequence[SpanView], record: Record, whole: Rendered) -> list[tuple[int, int]]:
    """First and one past the last character of parts of messages, where they stand in the chat.

    Args:
        views: the parts; a message is looked for once, however many parts it has.
        record: whose messages they are parts of.
        whole: the record as the template renders it.
    """
    trimmed: dict[int, int] = {}
    found = []
    for message, first, last in views:
        start, end = whole.spans[message]
        if message not in trimmed:
            # Templates that trim a content also trim it in front: its characters stand earlier than the record says.
            trimmed[message] = max(record.messages[message]["content"].find(whole.text[start:end]), 0)
        shift = start - trimmed[message]
        found.append((min(max(shift + first, start), end), min(max(shift + last, start), end)))
    return found


def token_spans(views: Sequence[SpanView], record: Record, whole: Rendered, tokens: Tokens) -> list[tuple[int, int]]:
    """First and one past the last token of parts of messages, where they stand in the chat.

    Args:
        views: the parts.
        record: whose messages they are parts of.
        whole: the record as the template renders it.
        tokens: that text as tokens.
    """
    # All at once, and as numbers of their kind: each search would make a copy of the tokens otherwise.
    firsts, lasts = np.asarray(characters(views, record, whole), np.int32).reshape(-1, 2).T
    # A token belongs to the step in which it begins, so that a full stop fused with a blank line closes its step;
    # the first step takes the token that reaches into the content from outside.
    inclusive = np.fromiter((view.start == 0 for view in views), bool, len(views))
    begins = np.where(inclusive, tokens.ends.searchsorted(firsts, "right"), tokens.starts.searchsorted(firsts, "left"))
    return list(zip(begins.tolist(), tokens.starts.searchsorted(lasts, "left").tolist(), strict=True))
