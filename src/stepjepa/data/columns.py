"""Read the chat of a row from its columns: whole chats, questions and answers, Alpaca, Dolly, ShareGPT."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.data.messages import (
    SYSTEM_ROLES,
    WEIGHTS,
    continues_turn,
    from_json,
    is_absent,
    join_calls,
    number_as_text,
    read_message,
)
from stepjepa.data.row_error import SKIP, Remedy, RowError

USER = ("prompt", "question", "instruction", "input", "text", "query")
ASSISTANT = ("completion", "answer", "response", "output", "code")
"""Common column names of prompt and answer; the first one that a row has is read."""

CHATS = ("messages", "conversations", "conversation")
"""Columns of whole chats: with ``role`` and ``content``, or ShareGPT's ``from`` and ``value``."""

SYSTEM = ("system", "system_prompt")
"""Columns of a system prompt."""

THOUGHTS = ("reasoning_content", "thinking")
"""Columns of the thought of an answer."""

_MORE = ("input", "context")  # continue Alpaca's and Dolly's ``instruction``
_WANTED = ("chosen", "chosen_response", "chosen_messages", "preferred_output")
_UNWANTED = ("rejected", "rejected_response", "rejected_messages", "non_preferred_output")

MOST_NAMES = 12
"""Maximum number of columns that an error message lists."""

Columns = Sequence[str] | None
"""Names of two columns, of the user's and of the assistant's message; None recognises them automatically."""


_BARE = "JepaConfig(mode='regular', plain=True, labels='all')"  # trains texts without questions
_COLUMNS = "columns USER ASSISTANT"  # the setting, as a user writes it


class Chat(NamedTuple):
    """The chat of a row."""

    messages: list[JsonObject]
    used: set[str]  # the columns that were read
    unused: list[str]  # keys of its messages that are not read, such as ``messages[].id``


def read_chat(
    row: Mapping[str, object], columns: Columns = None, *, system: str | None = None, system_prompt: str | None = None
) -> Chat:
    """Read the chat of a row.

    Without ``columns`` it is a whole chat (:data:`CHATS`), or the first of :data:`USER` and of :data:`ASSISTANT` that
    the row has. Each of the two is a text or, as in TRL, a list of messages; answers in the first are context. In
    Alpaca's form ``input`` continues ``instruction``, after the turns of ``history``; in Dolly's form ``context`` does.
    A column of :data:`SYSTEM` is the system message, one of :data:`THOUGHTS` the thought of an answer. With
    ``columns``, no other column is read.

    Args:
        row: column name -> value.
        columns: names of the columns of the user's and the assistant's message.
        system: name of the column of a system prompt, instead of :data:`SYSTEM`.
        system_prompt: a fixed system prompt for all rows.

    Raises:
        UserError: the row has no such chat, has preferences, or a message is wrong.
    """
    check_columns(columns)
    chat = _recognised_chat(row) if columns is None else _chat_of_columns(row, *columns)
    if columns is None:
        _check_no_preferences(row, chat.used)
    if system is not None:
        system_prompt = _text(row, _column(row, (system,)))
        chat.used.add(system)
    if system_prompt is not None:
        chat_messages = [message for message in chat.messages if message["role"] not in SYSTEM_ROLES]
        return chat._replace(messages=[{"role": "system", "content": system_prompt}, *chat_messages])
    return chat if columns is not None else _with_system(chat, row)


def check_columns(columns: Columns) -> None:
    """Raise ``UserError`` unless ``columns`` is None or two names."""
    names = [columns] if isinstance(columns, str) else columns
    if names is None or len(names) == 2:
        return
    parts = [part for part in re.split(r"[\s,]+", names[0]) if part] if len(names) == 1 else []
    remedy = f"; write two names: {' '.join(parts)}, in a file and in Python {parts}" if len(parts) == 2 else ""
    raise UserError(f"columns: expected two names, USER ASSISTANT, got {shown(' '.join(names))}{remedy}")


def _chat_of_columns(row: Mapping[str, object], user_name: str, assistant_name: str) -> Chat:
    """Read the chat of two named columns."""
    user_column, assistant_column = _column(row, (user_name,)), _column(row, (assistant_name,))
    chat = Chat([], {user_column, assistant_column}, [])
    _add_turns(chat, row, user_column, "user")
    _add_turns(chat, row, assistant_column, "assistant")
    return chat


def _recognised_chat(row: Mapping[str, object]) -> Chat:
    """Read the chat of a row by the usual names of columns: a whole chat, or else a question and an answer."""
    chat_column = next((name for name in CHATS if not is_absent(row.get(name))), None)
    if chat_column is not None:
        chat = Chat([], {chat_column}, [])
        _add_turns(chat, row, chat_column, None)
        return chat
    user_column, assistant_column = _column(row, USER), _column(row, ASSISTANT)
    chat = Chat([], {user_column, assistant_column}, [])
    if "history" in row:
        chat.used.add("history")
        _add_history(chat, row["history"])
    question = len(chat.messages)
    _add_turns(chat, row, user_column, "user")
    for name in _MORE if user_column == "instruction" else ():
        if name in row:
            chat.used.add(name)
            if not is_absent(row[name]):
                chat.messages[question]["content"] += f"\n\n{_text(row, name)}"
    _add_turns(chat, row, assistant_column, "assistant")
    if not isinstance(row[assistant_column], list):
        _add_thought(chat, row)
    return chat


def _with_system(chat: Chat, row: Mapping[str, object]) -> Chat:
    """Add the system message of a column, if the row has one."""
    for name in SYSTEM:
        if name not in row or name in chat.used:
            continue
        chat.used.add(name)
        if is_absent(row[name]):
            continue
        text, first = _text(row, name), chat.messages[0]
        if first["role"] not in SYSTEM_ROLES:
            chat.messages.insert(0, {"role": "system", "content": text})
        elif first["content"] != text:
            raise UserError(f"'{name}' and the {first['role']} message of the chat differ; keep one of the two")
    return chat


def _column(row: Mapping[str, object], names: Sequence[str]) -> str:
    """Return the first of ``names`` that is a column of the row; raise UserError if there is none."""
    for name in names:
        if name in row:
            return name
    columns = ", ".join(list(map(str, row))[:MOST_NAMES]) or "nothing"
    _check_no_preferences(row, set())
    if {"role", "content"} <= row.keys() or {"from", "value"} <= row.keys():
        raise UserError("got a message where a record is expected; write a chat as one object, {'messages': [...]}")
    if len(names) > 1 and (chat := next((name for name in CHATS if name in row), None)) is not None:
        raise RowError(f"'{chat}' is {shown(row[chat])}", "fill it in", SKIP)
    if "input_ids" in row:
        raise UserError("'input_ids' are tokens, and records are texts, which are tokenised here; pass the texts")
    missing = f"no column '{names[0]}'"
    for name in names:
        _check_not_nested(row, name)
    if len(names) > 1:
        missing = f"no 'messages', and none of the columns {', '.join(names)}"
    if len(row) < 2:
        twice = f"name it twice for bare text, with `columns {columns} {columns}`, `plain`, `train_all` and `regular`"
        in_memory = f"bare text: write it as prompt and as completion, with {_BARE}"
        bare = [Remedy("columns", twice, in_memory)] if row and columns not in ASSISTANT else []
        raise RowError(f"{missing} (there is {columns})", "a record needs 'messages', or two such columns", *bare)
    if (steps := next((name for name, value in row.items() if _is_list_of_texts(value)), None)) is not None:
        raise RowError(f"{missing} (there is {columns})", _steps_remedy(str(steps)))
    remedy = Remedy("columns", f"name the two with `{_COLUMNS}`", "rename the two to prompt and completion")
    texts = Remedy("column", "name the `column` of bare texts")
    raise RowError(f"{missing} (there is {columns})", texts, remedy)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 1 and all(isinstance(text, str) for text in value)


def _steps_remedy(name: str) -> str:
    """Return what to do with a column that is a list of steps."""
    return f"if '{name}' holds steps, stepjepa prepare steps --response_field {name} makes an answer of them"


def _check_not_nested(row: Mapping[str, object], name: str) -> None:
    """Raise UserError for a dotted name of a field inside of a column, with a command that makes a column of it."""
    value: object = row
    path = name.split(".")
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return
        value = value[key]
    if len(path) == 1:
        return
    field = "".join(f"[{json.dumps(key)}]" for key in path)
    line = f"{{**row, {json.dumps(name)}: row{field}}}"
    program = f"import json, sys; [print(json.dumps({line})) for row in map(json.loads, sys.stdin)]"
    raise UserError(
        f"'{name}' is a field inside of '{path[0]}', no column; make one of it, for JSON lines with: "
        f"python -c {shlex.quote(program)} < FILE > flat.jsonl"
    )


def _add_turns(chat: Chat, row: Mapping[str, object], name: str, role: str | None) -> None:
    """Add a column to a chat: a text of one role or, as TRL also takes them, a list of turns."""
    turns = row[name]
    if role is not None and not (isinstance(turns, list) and any(isinstance(turn, Mapping) for turn in turns)):
        chat.messages.append({"role": role, "content": _text(row, name)})
        return
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = from_json(turns, name, "a list of messages")
    if not isinstance(turns, list | tuple):
        raise UserError(f"'{name}' must be a list of messages with 'role' and 'content', or 'from' and 'value'")
    for index, turn in enumerate(turns):
        message, unused = read_message(turn, f"{name}[{index}]")
        if role == "user" and message["role"] == "assistant" and all(is_absent(turn.get(key)) for key in WEIGHTS):
            message["weight"] = 0  # an answer of a prompt, which TRL does not train
        if index > 0 and message.get("tool_calls") and continues_turn(turn, chat.messages[-1]):
            message = join_calls(chat.messages.pop(), message, f"{name}[{index}]")
        chat.messages.append(message)
        chat.unused.extend(f"{name}[].{key}" for key in unused if f"{name}[].{key}" not in chat.unused)


def _add_history(chat: Chat, history: object) -> None:
    """Add the turns of Alpaca's ``history``: pairs of question and answer."""
    if is_absent(history):
        return
    pairs = from_json(history, "history", "a list of pairs of texts")
    for index, pair in enumerate(pairs if isinstance(pairs, list | tuple) else [pairs]):
        texts = pair if isinstance(pair, list | tuple) and len(pair) == 2 else [None]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(f"history[{index}] is {shown(pair)}; expected a pair of texts, [question, answer]")
        chat.messages.extend(
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)
        )


def _add_thought(chat: Chat, row: Mapping[str, object]) -> None:
    """Add the column of a thought, if the row has one, to its answer."""
    name = next((name for name in THOUGHTS if isinstance(row.get(name), str) and not is_absent(row[name])), None)
    if name is not None:
        chat.used.add(name)
        chat.messages[-1]["reasoning_content"] = row[name]


def _text(row: Mapping[str, object], name: str) -> str:
    """Return the text of a column; numbers become text, UserError for any other value or an empty text."""
    value = row[name]
    fault = f"column '{name}' is {shown(value)}; expected a text"
    if isinstance(value, bool):
        raise UserError(f"{fault}; write true and false as texts, such as yes and no")
    value = number_as_text(value)
    if isinstance(value, list | tuple | Mapping):
        other = Remedy("columns", f"name another column with `{_COLUMNS}`", "name the column with the text as this one")
        steps = [_steps_remedy(name)] if _is_list_of_texts(value) else []
        raise RowError(fault, "write one text there", *steps, other)
    if is_absent(value):
        raise RowError(fault, "fill it in", SKIP)
    if not isinstance(value, str):
        raise RowError(fault, "write it as one", SKIP)
    return value


def _check_no_preferences(row: Mapping[str, object], used: set[str]) -> None:
    """Raise UserError for preference columns: rejected answers would be trained."""
    pairs = [name for name in (*_WANTED, *_UNWANTED) if name not in used and not is_absent(row.get(name))]
    if pairs:
        fault = f"{' and '.join(map(repr, pairs))}: preferences, which are not trained on"
        raise RowError(fault, *_remedies_of_preferences(row, pairs[0]))
    for name in ("label", "kto_tag"):
        value = row.get(name)
        is_mark = isinstance(value, bool) or str(value).lower() in {"true", "false"} or name == "kto_tag"
        if name not in used and is_mark and not is_absent(value):
            fault = f"'{name}' is {shown(value)}: it marks answers as wanted or not, and all would be trained"
            raise UserError(f"{fault}; keep the rows that are wanted, and remove the column")


def _remedies_of_preferences(row: Mapping[str, object], wanted: str) -> list[str | Remedy]:
    """Return the ways to train on the wanted answers of a row with preferences."""
    chat = next((name for name in CHATS if not is_absent(row.get(name))), None)
    if chat is not None:
        return [f"put the wanted answer at the end of '{chat}', and remove them"]
    if wanted in _UNWANTED:
        return ["remove the column, or train on the wanted answers alone"]
    answer = row[wanted]
    roles = [turn.get("role") for turn in answer if isinstance(turn, Mapping)] if isinstance(answer, list) else []
    if roles[:1] not in ([], ["assistant"]):
        return ["rename the wanted one to 'messages', and remove the other"]
    user_column = next((name for name in USER if isinstance(row.get(name), str | list)), None)
    if user_column is not None and (roles or isinstance(answer, str)):
        rename = f"rename '{wanted}' to completion and remove what is not wanted"
        return [rename, Remedy("columns", f"name both with `columns {user_column} {wanted}`")]
    return ["write the question and the wanted answer as 'messages', and remove them"]
