"""Name the parts of records that a chat template, or the plain format, leaves out, so that no loss is silent."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from stepjepa.chat.marks import Message
from stepjepa.chat.thought import without_thought
from stepjepa.chat.turn_text import Tools, Turn, Variables

NOT_USED = "not used"
"""The name of the line of a description that lists unused parts of records."""


class Reads(Protocol):
    """The parts of a record that a chat template, or the plain format, reads."""

    @property
    def variables(self) -> Collection[str]: ...  # that a caller may set
    @property
    def writes_tools(self) -> bool: ...
    @property
    def writes_calls(self) -> bool: ...


def parts_without_use(template: Reads, messages: Sequence[Message], tools: Tools, variables: Variables) -> list[str]:
    """Return the parts of a record that a template does not read, each with the reason.

    Args:
        template: renders the record.
        messages: of the record. A trained tool call is not named: the template refuses it.
        tools: of the record.
        variables: its ``chat_template_kwargs``.
    """
    unread = [name for name in variables or () if name not in template.variables]
    has_calls = not template.writes_calls and any(message.get("tool_calls") for message in messages)
    return [
        *(["tools; the template writes none"] if tools and not template.writes_tools else []),
        *(["messages[].tool_calls; the template writes none"] if has_calls else []),
        *(f"chat_template_kwargs.{name}; the template does not read it" for name in unread),
    ]


def contents_without_use(messages: Sequence[Message], turns: Sequence[Turn], *, plain: bool) -> list[str]:
    """Return the roles of the messages whose content is missing in the prompt of the next turn, each with the reason.

    Args:
        messages: of the record.
        turns: its trained turns as text.
        plain: the turns are in the plain format, not in that of a chat template.
    """
    roles = dict.fromkeys(str(message["role"]) for message in _missing(messages, turns))
    reason = "the plain format has the last question only" if plain else "the template leaves it out or rewrites it"
    return [f"messages[].content of role {role}; {reason}" for role in roles]


def _missing(messages: Sequence[Message], turns: Sequence[Turn]) -> Iterator[Message]:
    """Yield the messages whose content is not in the prompt of the first turn behind them."""
    first = 0
    for turn in turns:
        for number in range(first, turn.message):
            start, end = turn.spans[number]
            if start == end and not _is_written(messages[number], turn.text[: turn.answer]):
                yield messages[number]
        first = turn.message + 1


def _is_written(message: Message, prompt: str) -> bool:
    """Return whether a prompt has the content of a message without its thought, as it is or as JSON text."""
    content = str(message["content"])
    content = (without_thought(content) if message["role"] == "assistant" else content).strip()
    return content in prompt or json.dumps(content, ensure_ascii=False)[1:-1] in prompt
