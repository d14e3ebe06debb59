"""Name the parts of records that a chat template, or the plain format, leaves out, so that no loss is silent."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from stepjepa.chat.marks import REASONING_KEYS, Message
from stepjepa.chat.thought import without_thought
from stepjepa.chat.turn_text import Tools, Turn, Variables

NOT_USED = "not used"
"""The name of the line of a description that lists unused parts of records."""

_CONTENT, _CALLS, _NAME = "messages[].content", "messages[].tool_calls", "messages[].name"
_WORD = re.compile(r"\w+")


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
        *([f"{_CALLS}; the template writes none"] if has_calls else []),
        *(f"chat_template_kwargs.{name}; the template does not read it" for name in unread),
    ]


def texts_without_use(template: Reads, messages: Sequence[Message], turns: Sequence[Turn], *, plain: bool) -> list[str]:
    """Return which texts of messages that are not trained are missing in the prompt of the next turn, with the reason.

    Args:
        template: renders the record.
        messages: of the record.
        turns: its trained turns as text.
        plain: the turns are in the plain format, not in that of a chat template.
    """
    missing = dict.fromkeys(_missing(messages, turns))
    if plain:
        contents = [part for part in missing if part.startswith(_CONTENT)]
        names = [f"{part}; the plain format has none" for part in missing if part == _NAME]
        return [*(f"{part}; the plain format has the last question only" for part in contents), *names]
    named = [] if template.writes_calls else [_CALLS]  # by parts_without_use
    return [f"{part}; the template leaves it out or rewrites it" for part in missing if part not in named]


def _missing(messages: Sequence[Message], turns: Sequence[Turn]) -> Iterator[str]:
    """Yield the names of the texts that are not in the prompt of the first turn behind their message."""
    first = 0
    for turn in turns:
        prompt = turn.text[: turn.answer]
        for number in range(first, turn.message):
            message, (start, end) = messages[number], turn.spans[number]
            content = str(message["content"]).strip()
            behind = max((end for _, end in turn.spans[:number]), default=0)  # what is in front of the message
            if turn.text[start:end].strip() != content and not _is_written(message, prompt[behind:]):
                yield f"{_CONTENT} of role {message['role']}"
            if len(message) > 2:
                yield from _missing_parts(message, prompt)
        yield from _missing_name(messages[turn.message], turn.text)
        first = turn.message + 1


def _is_written(message: Message, prompt: str) -> bool:
    """Return whether a prompt has the content of a message without its thought, as it is or as JSON text."""
    content = str(message["content"])
    content = (without_thought(content) if message["role"] == "assistant" else content).strip()
    return content in prompt or json.dumps(content, ensure_ascii=False)[1:-1] in prompt


def _missing_parts(message: Message, prompt: str) -> Iterator[str]:
    """Yield the names of the thought, the calls and the speaker of a message that are not in a prompt."""
    for key in REASONING_KEYS:
        if not _has_words(prompt, [message.get(key)]):
            yield f"messages[].{key}"
    if not _has_words(prompt, [call.get("function", call) for call in message.get("tool_calls") or ()]):
        yield _CALLS
    yield from _missing_name(message, prompt)


def _missing_name(message: Message, text: str) -> Iterator[str]:
    """Yield the key of a speaker's name that is not in a text; that of a tool's result repeats the call's."""
    if message["role"] != "tool" and not _has_words(text, [message.get("name")]):
        yield _NAME


def _has_words(prompt: str, values: list[Any]) -> bool:
    """Return whether a prompt has the words of all texts among some values."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and not all(word in prompt for word in _WORD.findall(value)):
            return False
    return True
