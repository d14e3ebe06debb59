"""Records to tokens: each trained turn behind its served prompt, tokenised once, with its views in tokens.

Later stages never search text; this module alone knows modes and steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepjepa.base.errors import UserError, shown
from stepjepa.base.spool import BLOCK
from stepjepa.batch.main_text import MainText
from stepjepa.batch.pair_renderer import STEP_REMEDIES, PairRenderer
from stepjepa.batch.unread_answer import before_unread_answer
from stepjepa.batch.view_text import PairText
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.special_tokens import predictor_ids
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.tokens import TextTokenizer, Tokens, TurnTokens, overlap
from stepjepa.chat.turn_text import Rendered, Turn
from stepjepa.chat.turns import TurnError
from stepjepa.chat.unused import NOT_USED, parts_without_use, texts_without_use
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.views.sequences import Ids, Pair, TokenizedRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNTS = (
    "records",
    "turns",
    "turns skipped",
    "pairs",
    "without a pair",
    "over length",
    "truncated",
    "pairs cut by truncation",
    "skipped",
    "messages behind the last answer",
    "turns that spell special tokens",
    "answers tokenised apart",
)
"""Names of the counts that tokenising records makes."""

_WRITTEN_BY_TEMPLATE = (
    "the chat template writes it there, as some do between a thought or a content and tool calls; remove one of the "
    "two from the record, or use another `chat_template`"
)

WITHOUT_PAIR = "without a pair"
"""Key of :meth:`RecordTokenizer.describe`: how many records have no pair, and why."""


class _Placed(NamedTuple):
    """The main text that a turn is a part of, and the number of tokens up to the turn's end."""

    text: MainText
    length: int


class _RecordText(NamedTuple):
    """A record as text: the turns that it trains, and its pairs of views."""

    turns: list[Turn]
    pairs: list[PairText]


class TrainedTurn(NamedTuple):
    """A turn of a record, and how much of its text is kept."""

    turn: Turn
    end: int  # one past the last kept character; 0 if nothing of the turn is trained


class RecordTooLongError(UserError):
    """A record is longer than ``max_length``, and ``over_length`` makes that an error.

    Args:
        record: the record.
        length: of its first turn that is too long, with all in front of it, in tokens.
        limit: ``max_length``.
        of_others: a part of the message on the other records.
    """

    def __init__(self, record: Record, length: int, limit: int, of_others: str = "") -> None:
        super().__init__(
            f"the record has {length} tokens, more than max_length {limit}; {of_others}raise `max_length`, "
            "or pass `over_length truncate` or skip",
            path=record.path,
            line=record.line,
        )
        self._about = record, length, limit

    def among(self, records: int, too_long: int, longest: int) -> RecordTooLongError:
        """Return this error with the number of records, of those that are too long, and of tokens of the longest."""
        others = f"{too_long} of the first {records} records are too long, the longest has {longest} tokens: "
        return RecordTooLongError(*self._about, others if too_long > 1 else "")


class RecordTokenizer:
    """Tokenises records for one configuration.

    The tokenizer is fast, with predictor tokens (``add_predictor_tokens``), and a chat template or, for ``plain``, its
    tokens (``add_plain_tokens``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.template: ChatTemplate | PlainTemplate
        if config.plain:
            self.template = PlainTemplate(tokenizer, answers=config.labels != "all")
        else:
            self.template = ChatTemplate(tokenizer, config.chat_template_kwargs)
        self.predictors: Ids = np.asarray(predictor_ids(tokenizer, config.used_predictors), np.int32)  # [K]
        self._without_use = dict[str, None]()  # parts of the records so far that the template does not read
        self.counts: Counter[str] = Counter()  # of the records so far, by the names of ``COUNTS``
        self.longest = 0  # turn of the records so far, with all in front of it, in tokens
        self._without_pair: Counter[str] = Counter()  # reason -> number of records without a pair
        self.renderer = PairRenderer(self.template.render_alone, config)
        self._texts = TextTokenizer(tokenizer)
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._padding = -1 if padding is None else int(padding)

    @property
    def open_chats(self) -> bool:
        """Whether a question is read without its answer."""
        return False

    def check_variables(self) -> None:
        """Raise ``UserError`` for a variable of the chat template that would do nothing in a new run."""
        if isinstance(self.template, ChatTemplate):
            self.template.check_variables()

    def tokenize(self, records: Iterable[Record]) -> list[TokenizedRecord]:
        """Tokenise records, without those that are skipped."""
        return [record for record in self.tokenize_each(records) if record is not None]

    def tokenize_each(self, records: Iterable[Record]) -> list[TokenizedRecord | None]:
        """Tokenise records, with None for a skipped one; UserError with file and line for a wrong one."""
        waiting, tokenized = iter(records), list[TokenizedRecord | None]()
        # In blocks, since rendered texts with their character offsets take far more memory than tokens.
        while block := list(islice(waiting, BLOCK)):
            tokenized += self._tokenize_block(block)
        return tokenized

    def _tokenize_block(self, records: Sequence[Record]) -> list[TokenizedRecord | None]:
        """Tokenise some records together; None for a record that is skipped."""
        rendered = [self._render(record) for record in records]
        turn_tokens = iter(self._texts.turns([turn for text in rendered for turn in text.turns]))
        # Equal views are tokenised once.
        alone = dict.fromkeys(
            view.text for text in rendered for pair in text.pairs for view in pair.views if not view.in_main
        )
        alone_tokens = self._texts([text.text for text in alone], [text.spans for text in alone])
        encoded = dict(zip(alone, alone_tokens, strict=True))
        return [
            self._assemble(record, text, list(islice(turn_tokens, len(text.turns))), encoded)
            for record, text in zip(records, rendered, strict=True)
        ]

    def trained_turns(self, record: Record) -> list[TrainedTurn]:
        """Return the texts of :meth:`turns` up to where ``max_length`` cuts them; counts the record, as tokenising."""
        turns = self.turns(record)
        tokens = self._texts.turns(turns)
        _, placed = self._join_turns(record, turns, tokens)
        trained = []
        for number, (turn, turn_tokens) in enumerate(zip(turns, tokens, strict=True)):
            length, characters = placed[number].length if number in placed else 0, range(len(turn.text) + 1)
            whole = length == len(turn_tokens.tokens.ids)
            end = len(turn.text) if whole else bisect_left(characters, length, key=turn_tokens.tokens.first_overlapping)
            trained.append(TrainedTurn(turn, end))
        return trained

    def _render(self, record: Record) -> _RecordText:
        """Render the turns and the pairs of a record; its errors name file and line."""
        try:
            try:
                turns = self.turns(record)
            except TurnError as error:
                # Explicit views are read beside the whole chat.
                is_open = self.open_chats and record.views is None
                before = before_unread_answer(record.messages, error) if is_open else None
                if before is None:
                    raise
                turns = self.turns(replace(record, messages=before))
            return _RecordText(turns, self.pairs(record, turns))
        except UserError as error:
            raise error.at(record.path, record.line) from None

    def turns(self, record: Record) -> list[Turn]:
        """Return the texts that a record trains: its turns, or for the published labels the whole chat as one."""
        chat, template = record.chat, self.template
        self._without_use.update(dict.fromkeys(parts_without_use(template, *chat)))
        if self.config.labels == "assistant" and (isinstance(template, ChatTemplate) or template.answers):
            turns = template.turns(*chat)
            unused = texts_without_use(template, record.messages, turns, plain=self.config.plain)
            self._without_use.update(dict.fromkeys(unused))
            return turns
        rendered = template.render(*chat)
        plain_spans = tuple(span for span in rendered.spans if span[0] < span[1])
        return [Turn(len(record.messages) - 1, rendered.text, 0, rendered.spans, (0, 0), plain_spans, "")]

    def count_anew(self) -> None:
        """Forget the records so far, for :attr:`counts` and :attr:`without_pair`."""
        self.counts.clear()
        self._without_pair.clear()

    def describe(self) -> dict[str, str]:
        """Return facts about the chat template, which parts of the records so far it does not render, and no pairs."""
        unused = {NOT_USED: "; ".join(self._without_use)} if self._without_use else {}
        without = {} if self.without_pair is None else {WITHOUT_PAIR: self.without_pair}
        return self.template.describe() | unused | without

    @property
    def without_pair(self) -> str | None:
        """The number of records so far that have no pair, and why; None if all have one."""
        if not self._without_pair:
            return None
        count, records = self._without_pair.total(), self.counts["records"]
        have = "has" if count == 1 else "have"
        return f"{count:,} of {records:,} records {have} no pair: {self.reasons_without_pair}"

    @property
    def reasons_without_pair(self) -> str:
        """Why records so far have no pair; if there are several reasons, each with its number of records."""
        reasons = [f"{reason} ({count:,})" for reason, count in self._without_pair.most_common()]
        return next(iter(self._without_pair)) if len(reasons) == 1 else "; ".join(reasons)

    @property
    def step_remedy(self) -> str:
        """The settings that find steps in the answers without a pair; those that divide answers, if none is known."""
        remedies = [STEP_REMEDIES[reason] for reason, _ in self._without_pair.most_common() if reason in STEP_REMEDIES]
        return f"set {' or '.join(remedies)}" if remedies else "check `step_separator` and `max_length`"

    def pairs(self, record: Record, turns: Sequence[Turn]) -> list[PairText]:
        """Return the pairs of a record as texts; ``turns`` are those of :meth:`turns`."""
        return self.renderer.pairs(record, turns)

    def _assemble(
        self,
        record: Record,
        rendered: _RecordText,
        tokens: Sequence[TurnTokens],
        encoded: Mapping[Turn | Rendered, Tokens],
    ) -> TokenizedRecord | None:
        """Assemble a tokenised record; None for one without a trained turn within ``max_length``.

        Args:
            record: as read, for messages.
            rendered: the record as text.
            tokens: its turns as tokens.
            encoded: the tokens of each view that is rendered alone, by its text.
        """
        turns, pair_texts = rendered
        texts, placed = self._join_turns(record, turns, tokens)
        if not texts:
            self.counts["skipped"] += 1
            return None
        self.counts["turns"] += len(placed)
        self.counts["turns skipped"] += len(turns) - len(placed)
        for pair in pair_texts:
            if pair.turn in placed:
                self._locate_pair(pair, placed[pair.turn], tokens[pair.turn].tokens, encoded)
            else:
                self.counts["pairs cut by truncation"] += 1
        pairs = sum(len(text.pairs) for text in texts)
        if self.config.uses_views and not pairs:
            self._note_without_pair(record, turns, pair_texts)
        self.counts["records"] += 1
        self.counts["pairs"] += pairs
        self.counts["messages behind the last answer"] += record.dropped
        main, *further = (text.tokenized(record.line) for text in texts)
        return replace(main, further=tuple(further)) if further else main

    def _join_turns(
        self, record: Record, turns: Sequence[Turn], tokens: Sequence[TurnTokens]
    ) -> tuple[list[MainText], dict[int, _Placed]]:
        """Join the turns of a record to main texts, and count them.

        Returns the texts, and the place of each turn that is trained, by the turn's number.
        """
        config, counts = self.config, self.counts
        texts: list[MainText] = []
        placed: dict[int, _Placed] = {}
        too_long = [self._too_long(record, tokenized) for tokenized in tokens]
        counts["over length"] += any(too_long)
        counts["truncated"] += any(too_long) and config.over_length == "truncate"
        for number, (turn, (encoding, answer, is_apart, special)) in enumerate(zip(turns, tokens, strict=True)):
            ids = encoding.ids[: config.max_length]
            labels = self._labels(ids, answer)
            # Only truncation can leave no labels: an empty answer is an error when the file is read.
            if not len(labels) or (too_long[number] and config.over_length == "skip"):
                continue
            self._check_stop_tokens(record, encoding.ids[answer:])
            if not (texts and texts[-1].is_prefix_of(ids)):
                texts.append(MainText(ids))
            texts[-1].extend(ids, labels, self._prompt_labels(record, turn, encoding, len(ids)))
            placed[number] = _Placed(texts[-1], len(ids))
            spans = [span for span in turn.spans if span[0] < span[1]]
            counts["answers tokenised apart"] += is_apart
            counts["turns that spell special tokens"] += overlap(special, [*spans, *turn.own])
        return texts, placed

    def _prompt_labels(self, record: Record, turn: Turn, encoding: Tokens, length: int) -> Ids:
        """Return the positions that predict a token of the user messages before a turn, among ``length`` tokens."""
        spans = [turn.spans[place] for place in self._prompting_messages(record, turn)]
        # An empty span is a message that the template leaves out or rewrites.
        filled = [(start, end) for start, end in spans if start < end]
        ranges = [(encoding.first_overlapping(start), encoding.first_from(end)) for start, end in filled]
        return _positions_before(ranges, length)

    def _locate_pair(
        self, pair: PairText, placed: _Placed, turn: Tokens, encoded: Mapping[Turn | Rendered, Tokens]
    ) -> None:
        """Add a pair, as ranges of tokens, to the text of its turn; count it instead if truncation cuts a view."""
        text, length = placed
        first, second = (
            view.located(turn if view.in_main else encoded[view.text], text.ids) for view in (pair.first, pair.second)
        )
        # The text of a source may end in predictor tokens, which may be cut.
        ends = [view.end - view.predictors for view in (first, second)]
        limits = [length if view.in_main else self.config.max_length for view in (first, second)]
        if any(end > limit for end, limit in zip(ends, limits, strict=True)):
            self.counts["pairs cut by truncation"] += 1
        elif first.start < ends[0] and second.start < ends[1]:
            text.pairs.append(Pair(first, second))

    def _note_without_pair(self, record: Record, turns: Sequence[Turn], rendered: Sequence[PairText]) -> None:
        """Count a record without a pair by its reason; raise ``UserError`` where pairs are required."""
        if self.config.require_pairs:
            raise UserError(
                "the record has no usable pair of views (fewer than two steps, an empty view, or cut by "
                "truncation); check `step_separator` and `max_length`, or leave `require_pairs` out",
                path=record.path,
                line=record.line,
            )
        self.counts["without a pair"] += 1
        self._without_pair[self.renderer.reason_without_pair(record, turns, rendered)] += 1

    def _too_long(self, record: Record, tokens: TurnTokens) -> bool:
        """Return whether a turn has more than ``max_length`` tokens; ``RecordTooLongError`` if that is an error."""
        length, config = len(tokens.tokens.ids), self.config
        self.longest = max(self.longest, length)
        if length > config.max_length and config.over_length == "error":
            raise RecordTooLongError(record, length, config.max_length)
        return length > config.max_length

    def _prompting_messages(self, record: Record, turn: Turn) -> list[int]:
        """Return the user messages between the previous assistant message and a turn; all, if the chat is one text."""
        roles = [message["role"] for message in record.messages[: turn.message]]
        first = (
            0
            if self.config.labels != "assistant" or "assistant" not in roles
            else len(roles) - roles[::-1].index("assistant")
        )
        return [place for place in range(first, len(roles)) if roles[place] == "user"]

    def _labels(self, ids: Ids, answer: int) -> Ids:
        """Return the positions of a turn's text that are trained to predict the next token."""
        if self.config.labels == "reference":
            return np.flatnonzero(ids[1:] != self._padding).astype(np.int32)
        return np.arange(max(answer - 1, 0), max(len(ids) - 1, 0), dtype=np.int32)

    def _check_stop_tokens(self, record: Record, answer: Ids) -> None:
        """Raise ``UserError`` if an answer holds a stop token before its end: generation would never get beyond it."""
        # A saved model stops at the end of text, too, whether it ends a turn or not.
        ends = [*self.template.stop_ids, self.tokenizer.eos_token_id]
        stops = ends if self.config.labels == "assistant" else ()
        inner = [index for index in answer[:-1].tolist() if index in stops]
        if inner:
            token = shown(str(self.tokenizer.convert_ids_to_tokens(inner[0])))
            fault = f"the answer holds {token}, at which generation stops, before its end"
            written = str(self.tokenizer.decode(inner[:1]))
            is_own = any(written in str(value) for message in record.messages for value in message.values())
            remedy = "remove it from the record" if is_own else _WRITTEN_BY_TEMPLATE
            raise UserError(f"{fault}; {remedy}", path=record.path, line=record.line)


def _positions_before(ranges: Sequence[tuple[int, int]], length: int) -> Ids:
    """Return the positions that predict the tokens of some ranges, among the first ``length`` tokens."""
    if len(ranges) == 1:
        ((start, end),) = ranges
        # No position predicts the first token.
        return np.arange(max(start, 1) - 1, min(end, length) - 1, dtype=np.int32)
    # Ranges of several messages may overlap, since a token can reach from one into the next.
    predicted = np.zeros(length, bool)
    for start, end in ranges:
        predicted[start:end] = True
    return predicted[1:].nonzero()[0].astype(np.int32)
