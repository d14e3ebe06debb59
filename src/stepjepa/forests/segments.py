"""Records to forests: one tokenisation, character spans to token spans, segments laid out in a row.

No later stage looks for tokens again: labels, positions and readouts are all settled here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.layouts import Ids, Located, Placing
from stepjepa.forests.tokenisation import TextEncoder
from stepjepa.forests.views import MessageView, Pair, SpanView, View, find_pairs
from stepjepa.text.plain_template import PlainTemplate
from stepjepa.text.predictors import predictor_ids, predictor_token
from stepjepa.text.template import ChatTemplate, Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        return int(self.ends.searchsorted(character, side="right"))

    def first_from(self, character: int) -> int:
        """Index of the first token that begins at or after a character position."""
        return int(self.starts.searchsorted(character, side="left"))


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
        self._encoder = TextEncoder(tokenizer)
        assert config.predictors is not None
        wanted = config.predictors if config.uses_views else 0
        self._predictors = np.asarray(predictor_ids(tokenizer, wanted), np.int32)
        self._placing = Placing(config, self._predictors)
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
        return [Tokens(ids, offsets[0], offsets[1]) for ids, offsets in self._encoder.encode(texts)]

    def _one(
        self, record: Record, whole: Rendered, tokens: Tokens, pairs: list[Pair], alone: dict[_Alone, Located]
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
                else Located(tokens.ids, *token_span(view, record, whole, tokens), in_main=True)
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
        return self._placing.forest(ids, labels, usable, record.line)

    def _main_length(self, record: Record, whole: Rendered, tokens: Tokens) -> int:
        """Tokens up to the end of the last assistant turn: what the template writes behind it teaches nothing."""
        if self.config.labels == "assistant":
            return tokens.first_from(whole.turn_ends[-1])
        return len(tokens.ids)

    def _shift_labels(self, record: Record, whole: Rendered, tokens: Tokens) -> Ids:
        """``[L]``: what each position must predict; see ``JepaConfig.labels``."""
        labels = np.full(len(tokens.ids), IGNORE, np.int32)
        if self.config.labels == "assistant":
            for message, (start, _), end in zip(record.messages, whole.spans, whole.turn_ends, strict=True):
                if message["role"] == "assistant":
                    # Nothing predicts the first token of a row.
                    first, last = max(tokens.first_overlapping(start), 1), tokens.first_from(end)
                    if first < last:
                        labels[first - 1 : last - 1] = tokens.ids[first:last]
            return labels
        labels[:-1] = tokens.ids[1:]
        if self.config.labels == "reference":
            labels[np.isin(labels, self.template.end_of_turn_ids)] = IGNORE
        return labels


def _locate_alone(tokens: Tokens, rendered: Rendered, predictors: int) -> Located:
    start, end = rendered.spans[0]
    return Located(tokens.ids, tokens.first_overlapping(start), tokens.first_from(end), False, predictors)


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
