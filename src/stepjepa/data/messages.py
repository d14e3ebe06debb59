"""Normalise messages of a chat from many formats: contents, thoughts, tool calls, weights, tools."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepjepa.base.errors import UserError, shown, visible
from stepjepa.base.json_object import JsonObject, RepeatedKeyError, WrittenFloat, json_fault, parse_data
from stepjepa.base.similar_names import did_you_mean, question, similar_names

ROLES = ("system", "developer", "user", "assistant", "tool")

SYSTEM_ROLES = ("system", "developer")
"""Roles of the message in front that says how to answer: ``developer`` is OpenAI's newer name of ``system``."""

# Names of roles in ShareGPT's, ms-swift's and OpenAI's older forms.
_OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_call": "assistant",
    "tool_response": "tool",
}
_CALLS = {"function_call", "tool_call"}  # roles whose content is a call: ShareGPT's, ms-swift's
_ARGUMENTS = ("arguments", "parameters", "args", "input")  # of a call: OpenAI's name, and those of others
TOOLS = ("tools", "functions")
"""Fields of the functions that an assistant may call; the second is OpenAI's older name."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
WEIGHTS = ("weight", "train", "training", "loss")
"""Keys that say whether a message is trained: OpenAI's, Axolotl's (two names), ms-swift's."""

# Words in names of keys that say in another way whether a message is trained.
_OF_TRAINING = {"loss", "train", "trained", "trainable", "training", "untrained", "mask", "masked"}
_EXPECTED = f"expected 'role', one of {', '.join(ROLES)}, and 'content', a text"
MEDIA = frozenset({"images", "image", "videos", "video", "audios", "audio"})
_TEXTS = (None, "text", "input_text", "output_text")  # types of parts; the last two are those of OpenAI's responses
_THOUGHTS = ("thinking", "reasoning")  # types of parts, too
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")
_PLAIN = {"role", "content"}
_TEXT_ROLES = {"system", "user", "assistant"}
_READ = {"role", "from", "content", "value", "tool_calls", "function_call", "name", "tool_call_id"}
_READ |= {*_REASONING, *WEIGHTS}


def is_absent(value: object) -> bool:
    """Return whether a field is empty: null, NaN (the gap of a table), blank, or an empty list or object."""
    if isinstance(value, str | Mapping | list | tuple):
        return not (value.strip() if isinstance(value, str) else value)
    return value is None or (isinstance(value, float) and math.isnan(value))


def number_as_text(value: object) -> object:
    """Return a number as it is written in its file, since questions and answers may be numbers; else the value."""
    if isinstance(value, WrittenFloat):
        return value.text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and not (isinstance(value, float) and not math.isfinite(value)) else value


def as_python(value: Any) -> Any:
    """Convert values of NumPy and pandas to Python: arrays to lists, scalars to Python's numbers, gaps to None."""
    if isinstance(value, Mapping):
        return {name: as_python(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_python(item) for item in value]
    # Includes NumPy scalars that are subclasses of Python's numbers and texts.
    if hasattr(value, "dtype"):
        # Widened to 64 bits, a number of 32 would be another decimal.
        is_narrow = value.dtype.kind == "f" and value.dtype.itemsize < 8 and getattr(value, "ndim", 1) == 0
        return float(str(value)) if is_narrow else as_python(value.tolist())
    return None if type(value).__name__ in {"NAType", "NaTType"} else value


def from_json(value: object, name: str, expected: str) -> Any:
    """Parse a field that may hold JSON as text, as in tables; raise UserError if the text is no usable JSON.

    Args:
        value: text, or a value that is parsed already, which is returned.
        name: of the field, for the error.
        expected: what the field should hold, for the error.
    """
    if not isinstance(value, str):
        return value
    try:
        parsed = parse_data(value)
        fault = json_fault(parsed) if "\\u" in value else None
    except RepeatedKeyError as error:
        fault = str(error)
    except (ValueError, RecursionError):
        raise UserError(f"'{name}' is {shown(value)}; expected {expected}, or the same as JSON text") from None
    if fault is not None:
        raise UserError(f"'{name}' {fault}")
    return parsed


def read_message(turn: object, name: str) -> tuple[JsonObject, list[str]]:
    """Return one message in the form of :class:`stepjepa.data.record.Record`, and its keys that are not read.

    Args:
        turn: a message with ``role`` and ``content``, or ShareGPT's ``from`` and ``value``; the content may be parts of
            type ``text``.
        name: its place in the row, for errors: ``messages[2]``.

    Raises:
        UserError: a field has a wrong value, or fields contradict each other.
    """
    if not isinstance(turn, Mapping):
        raise UserError(f"{name} is {shown(turn)}; {_EXPECTED}")
    if turn.keys() == _PLAIN:
        role, text = turn["role"], turn["content"]
        if isinstance(role, str) and role in _TEXT_ROLES and isinstance(text, str) and text.strip():
            return {"role": role, "content": text}, []  # fast path for most messages, in a fifth of the time
    check_text_only(turn, f"{name}.")
    role, value = _role(turn, name), _first(turn, "content", "value")
    unread = [str(key) for key, item in turn.items() if not (is_absent(item) or _is_read(turn, key))]
    if _first(turn, "role", "from") in _CALLS:
        calls, value = _calls(value, f"{name}.value", "value", unread), None
    else:
        called = [turn[key] for key in ("function_call", "tool_calls") if not is_absent(turn.get(key))]
        if len(called) > 1:
            raise UserError(f"{name} has both 'function_call' and 'tool_calls', which are one field; keep one")
        calls = _calls(called[0] if called else None, f"{name}.tool_calls", "tool_calls[]", unread)
    reasoning, weight = _reasoning(turn, name), _weight(turn, role, name)
    _check_no_other_weight(turn, unread, name)
    for key, part in (("tool_calls", calls), ("reasoning_content", reasoning)):
        if part and role != "assistant":
            raise UserError(f"{name}.{key}: a {role} message has none; remove it, or make its role assistant")
    may_be_empty = bool(calls) or role in {"tool", *SYSTEM_ROLES}
    optional: JsonObject = {"reasoning_content": reasoning, "tool_calls": calls or None}
    labels = {"name": turn.get("name"), "tool_call_id": number_as_text(turn.get("tool_call_id"))}  # as a call's id
    optional |= {key: _label(label, f"{name}.{key}") for key, label in labels.items()}
    optional |= {"weight": 0 if weight == 0 and role == "assistant" else None}
    if value is None and not may_be_empty:
        raise UserError(f"{name} ({role}) has no content{_beside(unread)}")
    message = {"role": role, "content": _content(value, role, name, unread, may_be_empty=may_be_empty)}
    message |= {key: part for key, part in optional.items() if part is not None}
    return message, unread


def _role(turn: Mapping[str, object], name: str) -> str:
    """Return the role of a message, one of :data:`ROLES`; UserError for another."""
    role = source_role(turn)
    if not isinstance(role, str):
        raise UserError(f"{name} is {shown(turn)}; {_EXPECTED}")
    if role not in ROLES:
        fault = f"the role of {name} is {shown(role)}; expected one of {', '.join(ROLES)}"
        raise UserError(f"{fault}{did_you_mean(role, (*ROLES, *_OTHER_ROLES)) or '; rename it'}")
    return role


def source_role(turn: Mapping[str, object]) -> object:
    """Return the role of a message, names of other formats as ours (``human`` as ``user``); unknown ones unchanged."""
    named_role = _first(turn, "role", "from")
    return "tool" if turn.get("role") == "function" else _OTHER_ROLES.get(str(named_role), named_role)


def continues_turn(turn: Mapping[str, object], before: Mapping[str, object]) -> bool:
    """Return whether a message is a call of the turn before it: ShareGPT and ms-swift write a message for each call.

    Args:
        turn: as in the row.
        before: the message before it, as :func:`read_message` returns it.
    """
    return _first(turn, "role", "from") in _CALLS and before["role"] == "assistant"


def join_calls(before: JsonObject, call: JsonObject, name: str) -> JsonObject:
    """Return the turn of an assistant's message and of a call behind it; parallel calls are one turn.

    Args:
        before: the message in front, of text or calls.
        call: the message of the call.
        name: its place in the row, for errors.

    Raises:
        UserError: only one of the two is trained, or the call has a thought of its own.
    """
    if before.get("weight") != call.get("weight"):
        raise UserError(
            f"{name} and the message before it are one turn, and only one of them is trained; give both the same weight"
        )
    if "reasoning_content" in call:
        raise UserError(f"{name}.reasoning_content: the turn begins with the message before it; move the thought there")
    return {**before, "tool_calls": [*before.get("tool_calls", ()), *call["tool_calls"]]}


def _is_read(turn: Mapping[str, object], key: str) -> bool:
    """Return whether a key of a message is read: not if its value is another than that of the key that comes first."""
    for names in (("role", "from"), ("content", "value")):
        if key == names[1] and turn.get(names[0]) is not None:
            return turn[key] == turn[names[0]]
    return key in _READ


def _check_no_other_weight(turn: Mapping[str, object], unread: Sequence[str], name: str) -> None:
    """Raise UserError for a key that is not read and seems to say whether the message is trained, as ``mask: true``."""
    for key in filter(turn.__contains__, unread):  # without those of its tool calls
        is_mark = not isinstance(turn[key], str) or str(turn[key]).strip().lower() in {"true", "false", "0", "1"}
        if is_mark and not _OF_TRAINING.isdisjoint(key.lower().split("_")):
            raise UserError(
                f"{name}.{key} is {shown(turn[key])}; whether a message is trained is 'weight', 0 or 1: "
                f"write that instead of '{visible(key)}'"
            )


def _beside(unread: Sequence[str]) -> str:
    """Return the remedy for a message without a content; it names the key that may be a misspelt one."""
    if near := similar_names("content", unread):
        return f", but the unknown key '{visible(near[0])}'; {question(['content'])}"
    keys = f" (unknown keys: {', '.join(map(shown, unread[:8]))})" if unread else ""
    return f"{keys}; fill it in, or remove the record"


def _label(value: object, name: str) -> str | None:
    """Return a name or an id; None if it is absent, UserError if it is no text."""
    if is_absent(value):
        return None
    if isinstance(value, str):
        return value
    raise UserError(f"{name} is {shown(value)}; expected a text")


def _first(turn: Mapping[str, object], *names: str) -> Any:
    """Return the value of the first of ``names`` that has one."""
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _content(value: object, role: str, name: str, unread: list[str], *, may_be_empty: bool) -> str:
    if isinstance(value, list | tuple):
        value = "".join(_part(part, f"{name}.content[{index}]", unread) for index, part in enumerate(value))
    value = number_as_text(value)
    # A system prompt may be empty on purpose (it switches a template's default off); so may what a tool returned.
    if may_be_empty and (value is None or (isinstance(value, str) and not value.strip() and role == "assistant")):
        return ""
    if not isinstance(value, str):
        fault = f"{name}.content ({role}) is {shown(value)}; expected a text, or parts of type text"
        raise UserError(f"{fault}; write it as a text, or remove the record")
    if not may_be_empty and not value.strip():
        raise UserError(f"{name}.content ({role}) is empty; fill it or remove the record")
    return value


def _part(part: object, name: str, unread: list[str]) -> str:
    """Return the text of one part of a content, and add its keys that are not read to ``unread``.

    A picture is refused even where the file has none for it: it stands at a place of the chat.
    """
    if isinstance(part, str):
        return part
    fields = part if isinstance(part, Mapping) else {}
    kind, text = fields.get("type"), fields.get("text")
    others = [str(key) for key, value in fields.items() if not (key in {"type", "text"} or is_absent(value))]
    if kind in _TEXTS and isinstance(text, str):
        check_text_only(fields, f"{name}.")
        unread.extend(f"content[].{key}" for key in others if f"content[].{key}" not in unread)
        return text
    if isinstance(part, Mapping) and not others and is_absent(text) and kind in (*_TEXTS, *_THOUGHTS):
        return ""
    if kind in _TEXTS and not is_absent(text):
        raise UserError(f"{name}.text is {shown(text)}; expected a text")
    if kind in _THOUGHTS:
        raise UserError(f"{name} is a thought; write it as 'reasoning_content' of the message")
    description = f"a part of type {shown(kind)}" if isinstance(kind, str) else shown(part)
    raise UserError(
        f"{name} is {description}; expected parts {{'type': 'text', 'text': ...}}; remove the part or the record"
    )


def _reasoning(turn: Mapping[str, object], name: str) -> str | None:
    """Return the thought of a message, which may have one of several names."""
    thoughts: dict[str, str] = {}
    for key in _REASONING:
        thought = turn.get(key)
        if is_absent(thought):
            continue
        if not isinstance(thought, str):
            raise UserError(f"{name}.{key} is {shown(thought)}; expected a text")
        thoughts[key] = thought
    if len(set(thoughts.values())) > 1:
        raise UserError(f"{name} has both {' and '.join(thoughts)}, which are one field, and they differ; keep one")
    return next(iter(thoughts.values()), None)


def _weight(turn: Mapping[str, object], role: str, name: str) -> int | None:
    """Return 1 for a message marked as trained, 0 for one marked as context, None for an unmarked one."""
    if not is_absent(turn.get("train_detail")):
        raise UserError(f"{name}.train_detail: a message can't be trained in parts; remove it, or the record")
    weights: dict[str, int] = {}
    for key in WEIGHTS:
        value = turn.get(key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            continue
        if key == "loss" and not isinstance(value, bool):
            raise UserError(f"{name}.loss is {shown(value)}; expected true or false: whether the turn is trained")
        if not isinstance(value, int | float) or value not in {0, 1}:
            raise UserError(f"{name}.{key} is {shown(value)}; expected 0 (context) or 1 (trained)")
        weights[key] = int(value)
    if len(set(weights.values())) > 1:
        raise UserError(f"{name} has {' and '.join(weights)}, which say different things; keep one")
    if 1 in weights.values() and role != "assistant":
        key = next(iter(weights))
        raise UserError(f"{name}.{key}: only assistant messages are trained, and this is a {role} message; remove it")
    return next(iter(weights.values()), None)


def _calls(value: object, name: str, key: str, unread: list[str]) -> list[JsonObject]:
    """Return tool calls in OpenAI's form, with arguments as an object.

    Their keys that are not read are added to ``unread``, each behind ``key``.
    """
    if is_absent(value):
        return []
    value = from_json(value, name, "a list of tool calls")
    calls = []
    for index, call in enumerate(value if isinstance(value, list | tuple) else [value]):
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        title = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(title, str) or not title:
            form = "{'type': 'function', 'function': {'name': ..., 'arguments': {...}}}"
            raise UserError(f"{name}[{index}] is {shown(call)}; expected {form}")
        place = f"{name}[{index}].function.arguments"
        named = [spelling for spelling in _ARGUMENTS if not is_absent(function.get(spelling))]
        if len(named) > 1:
            raise UserError(f"{name}[{index}] has {' and '.join(named)}, which are one field; keep 'arguments'")
        arguments = from_json(function[named[0]], place, "an object") if named else {}
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise UserError(f"'{place}' is {shown(arguments)}; expected an object, or the same as JSON text")
        identifier = {} if is_absent(call.get("id")) else {"id": str(call["id"])}
        unread.extend(unread_key for unread_key in _unread_of_call(call, function, key) if unread_key not in unread)
        calls.append({**identifier, "type": "function", "function": {"name": title, "arguments": dict(arguments)}})
    return calls


def _unread_of_call(call: Mapping[str, object], function: Mapping[str, object], key: str) -> list[str]:
    """Return the keys of a tool call that are not read, as keys of ``key``; ``index`` is a position in a stream."""
    outer, inner = {"id", "type", "index"}, {"name", *_ARGUMENTS}
    parts = [(call, outer | inner)] if function is call else [(call, outer | {"function"}), (function, inner)]
    return [
        f"{key}.{name}" for part, known in parts for name in part if name not in known and not is_absent(part[name])
    ]


def tools_column(row: Mapping[str, object]) -> str:
    """Return the first of :data:`TOOLS` that a row has."""
    return next((name for name in TOOLS if not is_absent(row.get(name))), TOOLS[0])


def read_tools(value: object) -> list[JsonObject] | None:
    """Return the tools of a record in OpenAI's form; None if there are none.

    Args:
        value: a list of functions, or one as JSON text; each with or without the outer ``{"type": "function"}``.

    Raises:
        UserError: it is not such a list.
    """
    if is_absent(value) or is_absent(value := from_json(value, "tools", "a list of functions")):
        return None
    tools = []
    for index, tool in enumerate(value if isinstance(value, list | tuple) else [value]):
        inner = from_json(tool, f"tools[{index}]", "an object")
        function = inner.get("function", inner) if isinstance(inner, Mapping) else {}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
            raise UserError(
                f"tools[{index}] is {shown(tool)}; expected {form}; rename the field if it means another thing"
            )
        tools.append(_tool(inner))
    return tools


def _tool(tool: Mapping[str, Any]) -> JsonObject:
    """Return a tool with its ``type`` outside of the function, as a request to a server has it."""
    if "function" in tool:
        return dict(tool) if tool.get("type") is not None else {**tool, "type": "function"}
    # The form of OpenAI's responses has the type beside the name.
    function = {name: value for name, value in tool.items() if (name, value) != ("type", "function")}
    return {"type": "function", "function": function}


def read_variables(value: object) -> JsonObject | None:
    """Return ``chat_template_kwargs`` of a record; None if there are none.

    Args:
        value: an object, or one as JSON text.

    Raises:
        UserError: it is no object, or names a variable that is set for every chat.
    """
    name = "chat_template_kwargs"
    if is_absent(value) or is_absent(value := from_json(value, name, "an object")):
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UserError(f"'{name}' is {shown(value)}; expected an object, the variables of the chat template")
    if reserved := [key for key in value if key in _RESERVED]:
        raise UserError(f"'{name}' can't set '{reserved[0]}', which is set for every chat; remove it there")
    return dict(value)


def check_turns(messages: Sequence[Mapping[str, object]]) -> int:
    """Check the order of turns; return one past the index of the last trained assistant message.

    UserError if no assistant message is trained, or the order is wrong.
    """
    roles = [str(message["role"]) for message in messages]
    turns = roles[1:] if roles[:1] and roles[0] in SYSTEM_ROLES else roles
    may_follow = {"user": ("assistant", "tool", ""), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
    in_turn = all(before in may_follow.get(role, ()) for before, role in zip(["", *turns[:-1]], turns, strict=True))
    if not in_turn or "assistant" not in turns:
        role_names = (", ".join(roles[:8]) or "none") + (", ..." if len(roles) > 8 else "")
        expected = "user and assistant in turn, tool messages behind an assistant's, and a system message only in front"
        raise UserError(f"the turns are {role_names}; expected {expected}; join two of one role, or remove the record")
    trained = [number for number, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    trained = [number for number in trained if messages[number - 1].get("weight") != 0]
    if not trained:
        raise UserError("no assistant message is trained: all have weight 0; give one weight 1, or remove the record")
    return trained[-1]


def check_text_only(fields: Mapping[str, object], of: str = "") -> None:
    """Raise UserError for a row or a message (``of``) with images, videos or sounds."""
    for name in MEDIA.intersection(fields):
        if not is_absent(fields[name]):
            raise UserError(
                f"'{of}{name}' holds images, videos or sounds, and only text is trained on; remove it, or the record"
            )
