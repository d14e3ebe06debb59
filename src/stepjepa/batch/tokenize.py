"""Records to tokens: find the views, write the chat, tokenise it once, turn characters into tokens.

No later stage looks for tokens, and no other place knows modes and steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepjepa.base.errors import UserError
from stepjepa.batch.layouts import LAYOUTS
from stepjepa.batch.sequences import Ids, Pair, TokenizedRecord, View
from stepjepa.chat.template import ChatTemplate, PlainTemplate, Rendered
from stepjepa.chat.tokens import TextTokenizer, Tokens, predictor_ids, predictor_token
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.records import Record, find_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNTS = ("records", "pairs", "without a pair", "over length", "truncated", "pairs cut by truncation", "skipped")
"""What is counted while records are tokenised."""


BLOCK = 1000
"""Records that are best tokenised at once."""


class ViewText(NamedTuple):
    """A view as characters ``start`` to ``end`` of a rendered text, a step's separator included."""

    text: Rendered
    start: int
    end: int
    in_main: bool = False  # the text is the record's whole chat; otherwise it is a message alone
    predictors: int = 0  # how many predictor tokens it holds

    def place(self, tokens: Tokens) -> tuple[int, int]:
        """First and one past the last of the text's tokens.

        A token belongs to the step in which it begins, so that a full stop fused with a blank line closes its step; the
        first step takes the token that reaches into the content from outside.
        """
        begins = any(self.start == start for start, _ in self.text.spans)
        first = tokens.first_overlapping(self.start) if begins else tokens.first_from(self.start)
        return first, tokens.first_from(self.end)

    def located(self, tokens: Tokens, main: Ids) -> View:
        """The view as tokens of its text, which is ``main`` where it stands in the chat."""
        return View(main if self.in_main else tokens.ids, *self.place(tokens), self.in_main, self.predictors)


ViewPairs = list[tuple[ViewText, ViewText]]


def step_views(record: Record, main: Rendered, separator: str) -> list[ViewText]:
    """The reasoning steps of the last assistant message of a record, which is rendered as ``main``."""
    start, end = main.spans[-1]
    # Templates that trim a content also trim it in front: its characters stand earlier than the record says.
    shift = start - max(record.answer.find(main.text[start:end]), 0)
    places = [[min(max(shift + place, start), end) for place in step] for step in find_steps(record.answer, separator)]
    return [ViewText(main, first, last, in_main=True) for first, last in places]


class RecordTokenizer:
    """Tokenises records for one configuration.

    The tokenizer is fast, with predictor tokens (``add_predictor_tokens``), and a chat template or, for ``plain``, its
    tokens (``add_plain_tokens``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        plain = PlainTemplate(tokenizer, answers=config.labels != "all") if config.plain else None
        self.template = plain or ChatTemplate(tokenizer)
        self.predictors: Ids = np.asarray(predictor_ids(tokenizer, config.used_predictors), np.int32)  # [K]
        self.counts: Counter[str] = Counter()  # what was met so far, by the names of ``COUNTS``
        self._predictor_text = "".join(predictor_token(number) for number in range(1, len(self.predictors) + 1))
        self._texts = TextTokenizer(tokenizer)
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._padding = -1 if padding is None else int(padding)

    def tokenize(self, records: Iterable[Record]) -> list[TokenizedRecord]:
        """Tokenise records, best a thousand at a time; a skipped record gives none."""
        return [record for record in self.tokenize_each(records) if record is not None]

    def tokenize_each(self, records: Iterable[Record]) -> list[TokenizedRecord | None]:
        """The same with None in the place of a skipped record; UserError with file and line for a wrong one."""
        waiting, found = iter(records), list[TokenizedRecord | None]()
        # In blocks, since rendered texts and the places of their characters take far more memory than tokens.
        while block := list(islice(waiting, BLOCK)):
            found += self._tokenize_block(block)
        return found

    def _tokenize_block(self, records: Sequence[Record]) -> list[TokenizedRecord | None]:
        written = [(record, main := self._render(record), self.pairs(record, main)) for record in records]
        # Equal texts are tokenised once.
        texts = dict.fromkeys(
            text for _, main, pairs in written for text in (main, *(view.text for pair in pairs for view in pair))
        )
        tokens = self._texts([text.text for text in texts], [text.spans for text in texts])
        found = dict(zip(texts, tokens, strict=True))
        return [self._read(record, main, pairs, found) for record, main, pairs in written]

    def _render(self, record: Record) -> Rendered:
        try:
            return self.template.render(record.messages)
        except UserError as error:
            raise UserError(str(error), path=record.path, line=record.line) from None

    def pairs(self, record: Record, main: Rendered) -> ViewPairs:
        """The pairs of a record, the first view of each predicts the second (before ``reverse_pred``).

        * Step-JEPA: steps of the last assistant message, each with the one ``pair_distance`` further on.
        * LLM-JEPA: the messages that the layout calls partners, a question and its answer; the record's explicit
          views instead, where it has them. Layouts with ``views_in_text`` take the first message of a pair where it
          stands in the chat.
        """
        config, found = self.config, ViewPairs()
        if config.mode == "step-jepa":
            steps = step_views(record, main, config.step_separator)
            found += zip(steps, steps[config.pair_distance :], strict=False)
        elif config.mode == "llm-jepa" and record.views is not None:
            for source, target in record.views:
                if source.strip() and target.strip():
                    found.append((self._alone(0, "user", source), self._alone(1, "assistant", target)))
        elif config.mode == "llm-jepa":
            layout = LAYOUTS[str(config.layout)]
            messages = [(message["role"], message["content"]) for message in record.messages]
            for start, end in layout.partners(record.messages):
                first = ViewText(main, *main.spans[start], in_main=True)
                if not layout.views_in_text:
                    first = self._alone(0, *messages[start])
                found.append((first, self._alone(1, *messages[end])))
            # Without a chat format the last exchange is all there is.
            found = found[-1:] if config.plain else found
        return found[:1] if config.pairs == "first" else found

    def _alone(self, place: int, role: str, content: str) -> ViewText:
        """The first or second view of a pair as a message alone in the template.

        A source's predictors are part of the text before it is tokenised. Put in afterwards they could come to stand
        behind a token that the content shares with the template's tail, such as OLMo-2's ``?`` with the line end.
        """
        is_source, front = place == self.config.reverse_pred, self.config.front_pred
        added = self._predictor_text if is_source else ""
        alone = self.template.render_alone(role, added + content if front else content + added)
        start, end = alone.spans[0]
        # What the record itself says, where special tokens are but text.
        own = (start + len(added), end) if front else (start, end - len(added))
        return ViewText(alone._replace(spans=(own,)), start, end, predictors=len(self.predictors) if is_source else 0)

    def _read(
        self, record: Record, main: Rendered, written: ViewPairs, encoded: Mapping[Rendered, Tokens]
    ) -> TokenizedRecord | None:
        config, counts, tokens = self.config, self.counts, encoded[main]
        where: Any = {"path": record.path, "line": record.line}
        starts, ends = np.array(main.spans, np.int32).T
        # For each message the first token of its content, one past the last, and one past the end of its turn.
        first, last = tokens.ends.searchsorted(starts, "right").tolist(), tokens.starts.searchsorted(ends).tolist()
        turn = tokens.starts.searchsorted(np.array(main.turn_ends, np.int32)).tolist()
        placed = list(zip([message["role"] for message in record.messages], first, last, turn, strict=True))
        # What the template writes behind the last turn teaches nothing.
        length = turn[-1] if config.labels == "assistant" else len(tokens.ids)
        too_long = length > config.max_length
        if too_long and config.over_length == "error":
            raise UserError(
                f"the record has {length} tokens, more than max_length {config.max_length}; raise --max_length, "
                "or pass --over_length truncate or skip",
                **where,
            )
        counts["over length"] += too_long
        counts["truncated"] += too_long and config.over_length == "truncate"
        ids = tokens.ids[: min(length, config.max_length)]
        if config.labels == "assistant":
            labels = _before([(start, end) for role, start, _, end in placed if role == "assistant"], len(ids))
        else:
            taught = np.ones(max(len(ids) - 1, 0), bool) if config.labels == "all" else ids[1:] != self._padding
            labels = np.flatnonzero(taught).astype(np.int32)
        # Only truncation can leave nothing to learn: an empty answer is refused when the file is read.
        if not len(labels) or (too_long and config.over_length == "skip"):
            counts["skipped"] += 1
            return None
        pairs = []
        for texts in written:
            pair = Pair(*(view.located(encoded[view.text], ids) for view in texts))
            # Behind what the record says there may be predictor tokens.
            ends = [view.end - view.predictors for view in pair]
            limits = [len(ids) if view.in_main else config.max_length for view in pair]
            cut = any(end > limit for end, limit in zip(ends, limits, strict=True))
            counts["pairs cut by truncation"] += cut
            if not cut and all(end > view.start for end, view in zip(ends, pair, strict=True)):
                pairs.append(pair)
        if config.uses_views and not pairs:
            if config.require_pairs:
                raise UserError(
                    "the record has no usable pair of views (fewer than two steps, an empty view, or cut by "
                    "truncation); check --step_separator and --max_length, or leave --require_pairs out",
                    **where,
                )
            counts["without a pair"] += 1
        counts["records"] += 1
        counts["pairs"] += len(pairs)
        prompt = _before([(start, end) for role, start, end, _ in placed if role == "user"], len(ids))
        return TokenizedRecord(ids, labels, prompt, tuple(pairs), record.line)


def _before(ranges: Sequence[tuple[int, int]], length: int) -> Ids:
    """The positions in front of some ranges of tokens, among the first ``length`` tokens."""
    wanted = np.zeros(length, bool)
    for start, end in ranges:
        wanted[start:end] = True
    # Nothing predicts the first token.
    return wanted[1:].nonzero()[0].astype(np.int32)
