"""Messages with tool calls, as OpenAI, TRL and chat templates have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stepjepa.errors import UserError


def check_tools(tools: Any) -> tuple[Any, ...]:
    """The schemas of a record's functions, given as a list or as its JSON.

    Raises:
        UserError: they are no list of objects.
    """
    found = _decoded(tools)
    if found is None:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(each, dict) for each in found):
        raise UserError("'tools' must be a list of objects, the schemas of the functions, or its JSON")
    return tuple(found)


def check_tool_message(message: dict[str, Any], name: str) -> dict[str, Any]:
    """A call of the assistant, or the answer of a tool.

    Args:
        message: with ``role``, ``content``, which may be missing beside calls, and ``tool_calls`` or ``name``,
            ``tool_call_id``.
        name: what errors call it.

    Returns:
        The same with ``content`` as a text, and each call's arguments as an object: templates write these as JSON.

    Raises:
        UserError: a role, a text or a call's function and arguments are wrong.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{name}.content is {type(content).__name__}, expected a string")
    if not calls:
        return {key: value for key, value in message.items() if value is not None} | {"content": content}
    if message.get("role") != "assistant":
        raise UserError(f"{name} has 'tool_calls', which only an assistant message can have")
    if not isinstance(calls, list | tuple):
        raise UserError(f"{name}.tool_calls is {type(calls).__name__}, expected a list")
    return {"role": "assistant", "content": content, "tool_calls": [_check_call(each, name) for each in calls]}


def _check_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    known = function if isinstance(function, dict) else {}
    name_of_it, arguments = known.get("name"), _decoded(known.get("arguments"))
    if not isinstance(arguments, dict) or not isinstance(name_of_it, str):
        raise UserError(f"{name}.tool_calls: expected objects with a function's 'name' and 'arguments', an object")
    # Of rows whose calls have different arguments, data sets fill what is missing with nothing.
    given = {key: value for key, value in arguments.items() if value is not None}
    return {**call, "type": "function", "function": {"name": name_of_it, "arguments": given}}


def _decoded(value: Any) -> Any:
    """What a text holds as JSON; anything else, and what is no JSON, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def uses_tools(messages: Sequence[Any]) -> bool:
    """Whether a chat has calls or answers of tools."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def without_tools(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat with one message for each turn: calls and answers of tools belong to the assistant's turn.

    Raises:
        UserError: a tool answers where nothing was called.
    """
    turns: list[dict[str, Any]] = []
    inside = False
    for index, message in enumerate(messages):
        if message["role"] == "tool" and not inside:
            raise UserError(f"messages[{index}] is a tool's, and no call stands before it; add the assistant's call")
        follows = inside and message["role"] in ("assistant", "tool")
        inside = bool(message.get("tool_calls")) or (inside and message["role"] == "tool")
        if not follows:
            turns.append(message)
    if inside and messages[-1]["role"] == "tool":
        raise UserError("the last message is a tool's; expected the assistant's")
    return turns
