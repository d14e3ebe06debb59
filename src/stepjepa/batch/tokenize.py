"""Records to tokens: write the chat, tokenise it once, turn characters into tokens. No later stage looks for tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.batch.sequences import Ids, Pair, TokenizedRecord, View
from stepjepa.batch.views import MessageView, SpanView, find_pairs
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
    """A text as tokens.

    Attributes:
        ids: ``[L]`` token ids.
        starts: ``[L]`` first character of each token.
        ends: ``[L]`` one past its last character.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]

    def first_overlapping(self, character: int) -> int:
        """Index of the first token that reaches beyond a character position."""
        return int(self.ends.searchsorted(character, side="right"))

    def first_from(self, character: int) -> int:
        """Index of the first token that begins at or after a character position."""
        return int(self.starts.searchsorted(character, side="left"))


class _Text(NamedTuple):
    """A text to be tokenised.

    Attributes:
        text: with the template's special tokens.
        contents: first and one past the last character of what a record says in it, where special tokens are text.
    """

    text: str
    contents: tuple[tuple[int, int], ...]


class _ViewText(NamedTuple):
    """A view as characters.

    Attributes:
        text: the text that it stands in.
        start: its first character there.
        end: one past its last character.
        overlapping: a token that begins before the first character and reaches beyond it is part of the view.
        in_main: the text is the main text.
        predictors: how many predictor tokens its content holds.
    """

    text: _Text
    start: int
    end: int
    overlapping: bool = True
    in_main: bool = False
    predictors: int = 0


class _Written(NamedTuple):
    """A record as texts: the main text as rendered and as it is tokenised, and the views of each pair."""

    record: Record
    whole: Rendered
    main: _Text
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
        assert config.predictors is not None
        wanted = config.predictors if config.uses_views else 0
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
        text = _Text(whole.text, whole.spans)
        return self._encode([text])[text]

    # -- records to texts ----------------------------------------------------------------------------------------------

    def _write(self, record: Record) -> _Written:
        try:
            whole = self.template.render(record.messages)
        except UserError as error:
            raise UserError(str(error), path=record.path, line=record.line) from None
        main = _Text(whole.text, whole.spans)
        pairs = find_pairs(record, self.config)
        spans = [view for pair in pairs for view in pair if isinstance(view, SpanView)]
        places = iter(characters(spans, record, whole))
        written = []
        for pair in pairs:
            both = []
            for view, is_source in zip(pair, (not self.config.reverse_pred, self.config.reverse_pred), strict=True):
                if isinstance(view, MessageView):
                    both.append(self._write_alone(view, is_source))
                else:
                    start, end = next(places)
                    both.append(_ViewText(main, start, end, overlapping=view.start == 0, in_main=True))
            written.append((both[0], both[1]))
        return _Written(record, whole, main, written)

    def _write_alone(self, view: MessageView, is_source: bool) -> _ViewText:
        """Write a message alone in the template. A source's predictors are part of the text before it is tokenised.

        Put in afterwards they could come to stand behind a token that the content shares with the template's tail,
        such as OLMo-2's ``?`` with the line end.
        """
        added, front = self._predictor_text if is_source else "", self.config.front_pred
        content = added + view.content if front else view.content + added
        alone = self.template.render_alone(view.role, content)
        start, end = alone.spans[0]
        own = (start + len(added), end) if front else (start, end - len(added))
        return _ViewText(_Text(alone.text, (own,)), start, end, predictors=len(self.predictors) if is_source else 0)

    # -- texts to tokens -----------------------------------------------------------------------------------------------

    def _encode(self, texts: Iterable[_Text]) -> dict[_Text, Tokens]:
        """Tokenise texts, equal ones once."""
        plain: list[_Text] = []
        spelling: list[_Text] = []
        for text in dict.fromkeys(texts):
            spelt = self._special is not None and self._special.spelt(*text)
            (spelling if spelt else plain).append(text)
        found: dict[_Text, Tokens] = {}
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
            ids, offsets = self._special.encode(*zip(*spelling, strict=True))
            found |= zip(spelling, map(_as_tokens, ids, offsets), strict=True)
        return found

    # -- characters to tokens ------------------------------------------------------------------------------------------

    def _read(self, written: _Written, encoded: Mapping[_Text, Tokens]) -> TokenizedRecord | None:
        record, config, counts = written.record, self.config, self.counts
        tokens = encoded[written.main]
        length = len(tokens.ids)
        if config.labels == "assistant":
            # What the template writes behind the last turn teaches nothing.
            length = tokens.first_from(written.whole.turn_ends[-1])
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
        ids = tokens.ids[: config.max_length][:length]
        labels = self._labels(written, tokens, ids)
        # Only truncation can leave nothing to learn: an empty answer is refused when the file is read.
        if not len(labels) or (length > config.max_length and config.over_length == "skip"):
            counts["skipped"] += 1
            return None
        pairs = []
        for both in written.pairs:
            first, second = (_locate(view, encoded[view.text], ids) for view in both)
            cut = any(_content_end(v) > (len(ids) if v.in_main else config.max_length) for v in (first, second))
            counts["pairs cut by truncation"] += cut
            if not cut and all(_content_end(view) > view.start for view in (first, second)):
                pairs.append(Pair(first, second))
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
        spans = zip(record.messages, written.whole.spans, strict=True)
        asked = [span for message, span in spans if message["role"] == "user"]
        prompt = _before(asked, tokens, len(ids))
        return TokenizedRecord(ids, labels, prompt, tuple(pairs), record.line, _messages(written, tokens, len(ids)))

    def _labels(self, written: _Written, tokens: Tokens, ids: Ids) -> Ids:
        """The positions whose next token is taught; see ``JepaConfig.labels``."""
        if self.config.labels == "assistant":
            whole, messages = written.whole, written.record.messages
            taught = [
                (start, end)
                for message, (start, _), end in zip(messages, whole.spans, whole.turn_ends, strict=True)
                if message["role"] == "assistant"
            ]
            return _before(taught, tokens, len(ids))
        taught_ids = np.ones(max(len(ids) - 1, 0), bool) if self.config.labels == "all" else ids[1:] != self._padding
        return np.flatnonzero(taught_ids).astype(np.int32)


def _as_tokens(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Tokens:
    flat = np.fromiter(chain.from_iterable(offsets), np.int32, 2 * len(ids))
    return Tokens(np.array(ids, np.int32), flat[::2].copy(), flat[1::2].copy())


def _before(spans: Iterable[tuple[int, int]], tokens: Tokens, length: int) -> Ids:
    """The positions in front of the tokens of some characters, among the first ``length`` tokens."""
    wanted = np.zeros(len(tokens.ids), bool)
    for start, end in spans:
        wanted[tokens.first_overlapping(start) : tokens.first_from(end)] = True
    # Nothing predicts the first token.
    return np.flatnonzero(wanted[1:length]).astype(np.int32)


def _messages(written: _Written, tokens: Tokens, length: int) -> Ids:
    """See ``TokenizedRecord.messages``; among the first ``length`` tokens."""
    found = []
    for message, (start, end) in zip(written.record.messages, written.whole.spans, strict=True):
        if message["role"] != "system":
            last = min(tokens.first_from(end), length)
            found.append((min(tokens.first_overlapping(start), last), last, message["role"] == "assistant"))
    return np.array(found, np.int32).reshape(-1, 3)


def _locate(view: _ViewText, tokens: Tokens, main: Ids) -> View:
    start = tokens.first_overlapping(view.start) if view.overlapping else tokens.first_from(view.start)
    ids = main if view.in_main else tokens.ids
    return View(ids, start, tokens.first_from(view.end), view.in_main, view.predictors)


def _content_end(view: View) -> int:
    """One past the last token of what the record says; behind it there may be predictor tokens."""
    return view.end - view.predictors


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

    A token belongs to the step in which it begins, so that a full stop fused with a blank line closes its step; the
    first step takes the token that reaches into the content from outside.

    Args:
        views: the parts.
        record: whose messages they are parts of.
        whole: the record as the template renders it.
        tokens: that text as tokens.
    """
    return [
        (tokens.first_overlapping(start) if view.start == 0 else tokens.first_from(start), tokens.first_from(end))
        for view, (start, end) in zip(views, characters(views, record, whole), strict=True)
    ]
