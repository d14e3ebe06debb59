"""Which parts of a record are views, and which view predicts which. The only place that knows modes and steps."""

from __future__ import annotations

from typing import NamedTuple

from stepjepa.batch.layouts import LAYOUTS
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.data.steps import find_steps


class MessageView(NamedTuple):
    """A message alone in the chat template."""

    role: str
    content: str


class SpanView(NamedTuple):
    """Part of a message where it stands in the chat: characters ``start`` to ``end``, a step's separator included."""

    message: int
    start: int
    end: int


Written = MessageView | SpanView
"""A view before it is tokenised."""


def step_views(record: Record, separator: str) -> list[SpanView]:
    """The reasoning steps of a record's last assistant message."""
    last = len(record.messages) - 1
    return [SpanView(last, step.start, step.end) for step in find_steps(record.answer, separator)]


def find_pairs(record: Record, config: JepaConfig) -> list[tuple[Written, Written]]:
    """The pairs of a record, the first view of each predicts the second (before ``reverse_pred``).

    There are none where it has too few steps or an explicit view is empty.

    * Step-JEPA: steps of the last assistant message, each with the one ``pair_distance`` further on.
    * LLM-JEPA: each user message with the assistant message that answers it; the record's explicit views
      instead, where it has them. Layouts with ``views_in_text`` take the user's message where it stands in
      the chat, except for explicit views, which do not stand there.
    """
    pairs: list[tuple[Written, Written]] = []
    if config.mode == "regular":
        return pairs
    if config.mode == "step-jepa":
        steps = step_views(record, config.step_separator)
        pairs += list(zip(steps, steps[config.pair_distance :], strict=False))
    elif record.views is not None:
        spoken = [(source, target) for source, target in record.views if source.strip() and target.strip()]
        pairs += [(MessageView("user", source), MessageView("assistant", target)) for source, target in spoken]
    else:
        assert config.layout is not None
        in_text = LAYOUTS[config.layout].views_in_text
        asked, exchanges = 0, []
        for index, message in enumerate(record.messages):
            if message["role"] == "user":
                asked = index
            # A call is no text that a question could predict.
            elif message["role"] == "assistant" and not message.get("tool_calls"):
                exchanges.append((asked, index))
        # Without a chat format the last exchange is all there is.
        for question, answer in exchanges[-1:] if config.plain else exchanges:
            user = record.messages[question]["content"]
            first = SpanView(question, 0, len(user)) if in_text else MessageView("user", user)
            pairs.append((first, MessageView("assistant", record.messages[answer]["content"])))
    return pairs[:1] if config.pairs == "first" else pairs
