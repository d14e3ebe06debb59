"""The arguments of tool calls in OpenAI's form: as JSON text, and by name."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def argument_names(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all arguments of a message's tool calls, nested ones included."""
    waiting: list[Any] = [call.get("function", call).get("arguments") for call in message.get("tool_calls") or ()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield from map(str, value)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
