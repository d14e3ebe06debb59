"""Records to forests, slowly: one record at a time, its template run, its texts tokenised whole, one view at a time.

What ``forests.segments`` does for many records at once is held to this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from slow_layouts import Ids, Located, SlowPlacing
from slow_tokens import slow_tokens
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.segments import token_spans
from stepjepa.forests.tokenisation import Tokens
from stepjepa.forests.views import MessageView, Pair, View, find_pairs
from stepjepa.text.frames import Rendered
from stepjepa.text.plain_template import PlainTemplate
from stepjepa.text.predictors import predictor_ids, predictor_token
from stepjepa.text.template import ChatTemplate


class SlowBuilder:
    """``ForestBuilder`` as one would first write it."""

    def __init__(self, tokenizer: Any, config: JepaConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        if config.plain:
            self.template: Any = PlainTemplate(tokenizer, answers=config.labels != "all")
        else:
            self.template = ChatTemplate(tokenizer)
            self.template._inert = False
        self.counts: Counter[str] = Counter()
        wanted = (config.predictors or 0) if config.uses_views else 0
        self._predictors = np.asarray(predictor_ids(tokenizer, wanted), np.int32)
        self._placing = SlowPlacing(config, self._predictors)
        self._predictor_text = "".join(predictor_token(number) for number in range(1, wanted + 1))

    def build(self, records: Sequence[Record]) -> list[Forest]:
        forests = [self._build_one(record) for record in records]
        return [forest for forest in forests if forest is not None]

    def _build_one(self, record: Record) -> Forest | None:
        try:
            whole = self.template.render(record.messages)
        except UserError as error:
            raise UserError(str(error), path=record.path, line=record.line) from None
        pairs = find_pairs(record, self.config)
        alone = {}
        for view, is_source in (end for pair in pairs for end in self._ends(pair)):
            if isinstance(view, MessageView):
                single = self._render_alone(view, is_source)
                predictors = len(self._predictors) if is_source else 0
                start, end = single.spans[0]
                if is_source:
                    added = len(self._predictor_text)
                    start, end = (start + added, end) if self.config.front_pred else (start, end - added)
                tokens = slow_tokens(self.tokenizer, single.text, [(start, end)])
                alone[view, is_source] = _locate_alone(tokens, single, predictors)
        return self._one(record, whole, slow_tokens(self.tokenizer, whole.text, whole.spans), pairs, alone)

    def _ends(self, pair: Pair) -> tuple[tuple[View, bool], tuple[View, bool]]:
        """The two views of a pair, each with whether it is the source."""
        return (pair.first, not self.config.reverse_pred), (pair.second, self.config.reverse_pred)

    def _render_alone(self, view: MessageView, is_source: bool) -> Rendered:
        content = view.content
        if is_source:
            added = self._predictor_text
            content = added + content if self.config.front_pred else content + added
        found: Rendered = self.template.render_alone(view.role, content)
        return found

    def _one(
        self,
        record: Record,
        whole: Rendered,
        tokens: Tokens,
        pairs: list[Pair],
        alone: dict[tuple[MessageView, bool], Located],
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
                else Located(tokens.ids, *token_spans([view], record, whole, tokens)[0], in_main=True)
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
