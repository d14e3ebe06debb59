"""Records to tokens: write the chat, tokenise it once, turn characters into tokens. No later stage looks for tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepjepa.batch.sequences import Ids, Pair, TokenizedRecord, View
from stepjepa.batch.views import MessageView, SpanView, Written, find_pairs
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.predictors import predictor_ids, predictor_token
from stepjepa.chat.special import SpecialTokens
from stepjepa.chat.template import ChatTemplate, Rendered
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNTS = ("records", "pairs", "without a pair", "over length", "truncated", "pairs cut by truncation", "skipped")
"""What is counted while records are tokenised."""


class Tokens(NamedTuple):
    """A text as ``[L]`` tokens: their ids, the first character of each, and one past its last."""

    ids: Ids
    starts: Ids
    ends: Ids

    def first_overlapping(self, character: int) -> int:
        """Index of the first token that reaches beyond a character position."""
        return int(self.ends.searchsorted(character, side="right"))

    def first_from(self, character: int) -> int:
        """Index of the first token that begins at or after a character position."""
        return int(self.starts.searchsorted(character, side="left"))


class _ViewText(NamedTuple):
    """A view as characters ``start`` to ``end`` of a text."""

    text: Rendered
    start: int
    end: int
    overlapping: bool = True  # with a token that begins before the first character and reaches beyond it
    in_main: bool = False  # the text is the main text
    predictors: int = 0  # how many predictor tokens it holds


class _RecordText(NamedTuple):
    """A record as texts."""

    record: Record
    main: Rendered
    pairs: list[tuple[_ViewText, _ViewText]]


class RecordTokenizer:
    """Tokenises records for one tokenizer and one configuration.

    Args:
        tokenizer: fast, with a chat template or, for ``plain``, its tokens (``plain_template.add_plain_tokens``);
            predictor tokens added (``predictors.add_predictor_tokens``).
        config: mode, layout, labels, limits.

    Attributes:
        template: writes the chats.
        predictors: ``[K]`` ids of the predictor tokens.
        counts: what was met so far, by the names of :data:`COUNTS`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.template = (
            PlainTemplate(tokenizer, answers=config.labels != "all") if config.plain else ChatTemplate(tokenizer)
        )
        wanted = (config.predictors or 0) if config.uses_views else 0
        self.predictors: Ids = np.asarray(predictor_ids(tokenizer, wanted), np.int32)
        self.counts: Counter[str] = Counter()
        self._predictor_text = "".join(predictor_token(number) for number in range(1, wanted + 1))
        # A tokenizer that splits special tokens anyway has none to tell apart.
        splits = getattr(tokenizer, "split_special_tokens", False)
        self._special = None if splits else SpecialTokens(tokenizer)
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._padding = -1 if padding is None else int(padding)

    def tokenize(self, records: Sequence[Record]) -> list[TokenizedRecord]:
        """Tokenise records; a skipped record gives none. Best a thousand at a time.

        Raises:
            UserError: a record is too long and ``over_length`` is ``error``; it has no pair and ``require_pairs`` is
                set; its template rewrites it. The message names file and line.
        """
        return [record for record in self.tokenize_each(records) if record is not None]

    def tokenize_each(self, records: Sequence[Record]) -> list[TokenizedRecord | None]:
        """The same with None in the place of a skipped record."""
        written = [self._write(record) for record in records]
        views = (view.text for each in written for pair in each.pairs for view in pair)
        tokens = self._encode(chain((each.main for each in written), views))
        return [self._read(each, tokens) for each in written]

    def tokens(self, whole: Rendered) -> Tokens:
        """Tokenise a rendered chat."""
        return self._encode([whole])[whole]

    # -- records to texts ----------------------------------------------------------------------------------------------

    def _write(self, record: Record) -> _RecordText:
        try:
            main = self.template.render(record.messages, record.tools)
        except UserError as error:
            raise UserError(str(error), path=record.path, line=record.line) from None
        pairs = find_pairs(record, self.config)
        places = iter(characters([v for pair in pairs for v in pair if isinstance(v, SpanView)], record, main))

        def write(view: Written, is_source: bool) -> _ViewText:
            if isinstance(view, MessageView):
                return self._write_alone(view, is_source)
            return _ViewText(main, *next(places), overlapping=view.start == 0, in_main=True)

        reverse = self.config.reverse_pred
        return _RecordText(
            record, main, [(write(first, not reverse), write(second, reverse)) for first, second in pairs]
        )

    def _write_alone(self, view: MessageView, is_source: bool) -> _ViewText:
        """Write a message alone in the template. A source's predictors are part of the text before it is tokenised.

        Put in afterwards they could come to stand behind a token that the content shares with the template's tail,
        such as OLMo-2's ``?`` with the line end.
        """
        added, front = self._predictor_text if is_source else "", self.config.front_pred
        alone = self.template.render_alone(view.role, added + view.content if front else view.content + added)
        start, end = alone.spans[0]
        # What the record itself says, where special tokens are but text.
        own = (start + len(added), end) if front else (start, end - len(added))
        return _ViewText(alone._replace(spans=(own,)), start, end, predictors=len(self.predictors) if is_source else 0)

    # -- texts to tokens -----------------------------------------------------------------------------------------------

    def _encode(self, texts: Iterable[Rendered]) -> dict[Rendered, Tokens]:
        """Tokenise texts, equal ones once."""
        plain: list[Rendered] = []
        spelling: list[Rendered] = []
        for text in dict.fromkeys(texts):
            spelt = self._special is not None and self._special.spelt(text.text, text.spans)
            (spelling if spelt else plain).append(text)
        found: dict[Rendered, Tokens] = {}
        if plain:
            # The template has written the special tokens; the tokenizer must not add a second begin-of-text.
            batch = self.tokenizer(
                [text.text for text in plain],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                # Lengths are checked here; the tokenizer's own warning about its model would only confuse.
                verbose=False,
            )
            found |= zip(plain, map(_as_tokens, batch["input_ids"], batch["offset_mapping"]), strict=True)
        if spelling:
            assert self._special is not None
            ids, offsets = self._special.encode([text.text for text in spelling], [text.spans for text in spelling])
            found |= zip(spelling, map(_as_tokens, ids, offsets), strict=True)
        return found

    # -- characters to tokens ------------------------------------------------------------------------------------------

    def _read(self, written: _RecordText, encoded: Mapping[Rendered, Tokens]) -> TokenizedRecord | None:
        record, main, config, counts = written.record, written.main, self.config, self.counts
        tokens = encoded[main]
        starts, ends = np.array(main.spans, np.int32).T
        # For each message the first token of its content, one past the last, and one past the end of its turn.
        first, last = tokens.ends.searchsorted(starts, "right").tolist(), tokens.starts.searchsorted(ends).tolist()
        turn = tokens.starts.searchsorted(np.array(main.turn_ends, np.int32)).tolist()
        placed = list(zip([message["role"] for message in record.messages], first, last, turn, strict=True))
        # What the template writes behind the last turn teaches nothing.
        length = turn[-1] if config.labels == "assistant" else len(tokens.ids)
        if length > config.max_length:
            if config.over_length == "error":
                raise UserError(
                    f"the record has {length} tokens, more than max_length {config.max_length}; raise --max_length, "
                    "or pass --over_length truncate or skip",
                    path=record.path,
                    line=record.line,
                )
            counts["over length"] += 1
            counts["truncated"] += config.over_length == "truncate"
        ids = tokens.ids[: min(length, config.max_length)]
        if config.labels == "assistant":
            labels = _before([(start, end) for role, start, _, end in placed if role == "assistant"], len(ids))
        else:
            taught = np.ones(max(len(ids) - 1, 0), bool) if config.labels == "all" else ids[1:] != self._padding
            labels = np.flatnonzero(taught).astype(np.int32)
        # Only truncation can leave nothing to learn: an empty answer is refused when the file is read.
        if not len(labels) or (length > config.max_length and config.over_length == "skip"):
            counts["skipped"] += 1
            return None
        pairs = self._pairs(written.pairs, encoded, ids)
        if config.uses_views and not pairs:
            if config.require_pairs:
                raise UserError(
                    "the record has no usable pair of views (fewer than two steps, an empty view, or cut by "
                    "truncation); check --step_separator and --max_length, or leave --require_pairs out",
                    path=record.path,
                    line=record.line,
                )
            counts["without a pair"] += 1
        counts["records"] += 1
        counts["pairs"] += len(pairs)
        prompt = _before([(start, end) for role, start, end, _ in placed if role == "user"], len(ids))
        messages = [
            (min(start, end, len(ids)), min(end, len(ids)), role == "assistant")
            for role, start, end, _ in placed
            if role != "system"
        ]
        return TokenizedRecord(ids, labels, prompt, pairs, record.line, np.array(messages, np.int32))

    def _pairs(
        self, written: list[tuple[_ViewText, _ViewText]], encoded: Mapping[Rendered, Tokens], main: Ids
    ) -> tuple[Pair, ...]:
        """The pairs that are usable: nothing of them is cut by truncation, and no view is without a token."""
        pairs = []
        for both in written:
            pair = Pair(*(_locate(view, encoded[view.text], main) for view in both))
            # Behind what the record says there may be predictor tokens.
            ends = [view.end - view.predictors for view in pair]
            limits = [len(main) if view.in_main else self.config.max_length for view in pair]
            cut = any(end > limit for end, limit in zip(ends, limits, strict=True))
            self.counts["pairs cut by truncation"] += cut
            if not cut and all(end > view.start for end, view in zip(ends, pair, strict=True)):
                pairs.append(pair)
        return tuple(pairs)


def _as_tokens(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Tokens:
    flat = np.fromiter(chain.from_iterable(offsets), np.int32, 2 * len(ids))
    return Tokens(np.array(ids, np.int32), flat[::2].copy(), flat[1::2].copy())


def _before(ranges: Iterable[tuple[int, int]], length: int) -> Ids:
    """The positions in front of some ranges of tokens, among the first ``length`` tokens."""
    wanted = np.zeros(length, bool)
    for start, end in ranges:
        wanted[start:end] = True
    # Nothing predicts the first token.
    return wanted[1:].nonzero()[0].astype(np.int32)


def _locate(view: _ViewText, tokens: Tokens, main: Ids) -> View:
    start = tokens.first_overlapping(view.start) if view.overlapping else tokens.first_from(view.start)
    ids = main if view.in_main else tokens.ids
    return View(ids, start, tokens.first_from(view.end), view.in_main, view.predictors)


def characters(views: Iterable[SpanView], record: Record, whole: Rendered) -> list[tuple[int, int]]:
    """First and one past the last character of parts of messages, where they stand in the chat.

    Args:
        views: the parts.
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
    """First and one past the last token of parts of messages; the arguments are those of :func:`characters`.

    A token belongs to the step in which it begins, so that a full stop fused with a blank line closes its step; the
    first step takes the token that reaches into the content from outside.
    """
    return [
        (tokens.first_overlapping(start) if view.start == 0 else tokens.first_from(start), tokens.first_from(end))
        for view, (start, end) in zip(views, characters(views, record, whole), strict=True)
    ]
