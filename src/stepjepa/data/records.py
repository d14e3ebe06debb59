"""Records: one row or JSON line each, checked; every error names file, line and field."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepjepa.data.formats import Columns, to_messages
from stepjepa.data.tools import check_tool_message, check_tools, without_tools
from stepjepa.errors import UserError, one_line, shown

ROLES = ("system", "user", "assistant", "tool")
_MOST_WORDS = 8

VIEW_ROLES = {"text": "user", "code": "assistant"}


@dataclass(frozen=True, slots=True)
class Record:
    """One example as read from a file.

    Attributes:
        messages: the chat, each a dict with the keys ``role`` and ``content``, and ``tool_calls`` or what else a tool's
            message has.
        views: explicit pairs of source and target view, where the file gives them; None where it does not.
        path: the file it came from, or a label where it came from memory.
        line: its line there, counted from 1.
        extra: the other fields of the line, untouched (``ground_truth``, ``answer`` ...).
        columns: of the line, which the chat was made of.
        tools: schemas of the functions that the assistant may call, for the chat template.
    """

    messages: tuple[dict[str, Any], ...]
    views: tuple[tuple[str, str], ...] | None = None
    path: str = "<memory>"
    line: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ("messages",)
    tools: tuple[Any, ...] = ()

    @property
    def answer(self) -> str:
        """The content of the last assistant message: what the model must learn to say."""
        return str(self.messages[-1]["content"])


def parse_record(
    value: Mapping[str, Any], path: str | os.PathLike[str] = "<memory>", line: int = 0, columns: Columns = None
) -> Record:
    """Check one object and make a record of it.

    Args:
        value: with ``messages``: optionally one system message first, then user and assistant in turn, an assistant
            message last; or the chat in another form, see ``formats.to_messages``. Optionally explicit views:
            ``views``, a list of pairs of texts; or ``text`` and ``code``, each a text or, as in the published files, a
            list of one message (``text`` of the user, ``code`` of the assistant). Optionally ``tools``, a list of
            schemas or its JSON; see ``data/tools.py`` for messages with ``tool_calls``.
        path: for error messages.
        line: for error messages, counted from 1.
        columns: of the user's and the assistant's message, where they have names of their own.

    Raises:
        UserError: the object does not have that form.
    """
    try:
        if columns is None and value.get("messages") is not None:
            messages, used = value["messages"], {"messages"}
        else:
            messages, used = to_messages(value, columns)
        checked = _check_messages(messages)
        tools = check_tools(value.get("tools"))
        views = _check_views(value, used)
    except UserError as error:
        raise UserError(str(error), path=path, line=line) from None
    extra = {key: value[key] for key in value if key not in {*used, "views", "tools", *VIEW_ROLES}}
    return Record(checked, views, str(path), line, extra, tuple(name for name in value if name in used), tools)


def _check_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("'messages' must be a list with at least one user and one assistant message")
    checked = tuple(_check_message(message, f"messages[{position}]") for position, message in enumerate(messages))
    # A call and what the tool answers are part of the assistant's turn.
    calls = without_tools(checked)
    turns = [message["role"] for message in calls if message["role"] != "system"]
    if any(message["role"] == "system" for message in checked[1:]):
        raise UserError("a system message that is not the first; move it to the front")
    for role in ("user", "assistant"):
        if role not in turns:
            raise UserError(f"'messages' has no {role} message; every record needs one")
    if turns != ["user", "assistant"] * (len(turns) // 2):
        told = ", ".join(turns if len(turns) <= _MOST_WORDS else [*turns[:_MOST_WORDS], "..."])
        raise UserError(f"the turns are {told}; expected user and assistant in turn, assistant last")
    return checked


def _check_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{name} is {type(message).__name__}, expected an object with 'role' and 'content'")
    if message.get("tool_calls") or message.get("role") == "tool":
        return check_tool_message(message, name)
    for key in ("role", "content"):
        if key not in message:
            raise UserError(f"{name} has no '{key}'; add it")
        if not isinstance(message[key], str):
            raise UserError(f"{name}.{key} is {type(message[key]).__name__}, expected a string")
    if message["role"] not in ROLES:
        raise UserError(f"{name}.role is {shown(message['role'])}, expected one of {', '.join(ROLES)}")
    # A system prompt may be empty on purpose (it switches a template's default off); nothing else may.
    if message["role"] != "system" and not message["content"].strip():
        raise UserError(f"{name}.content ({message['role']}) is empty; fill it or remove the record")
    return {"role": message["role"], "content": message["content"]}


def _check_views(value: Mapping[str, Any], used: set[str]) -> tuple[tuple[str, str], ...] | None:
    pairs = value.get("views")
    if pairs is not None:
        if not isinstance(pairs, list | tuple) or not all(_is_pair(pair) for pair in pairs):
            raise UserError("'views' must be a list of pairs of texts: [[source, target], ...]")
        return tuple((source, target) for source, target in pairs)
    # A table's columns of these names are the chat itself.
    text, code = (None if key in used else _check_view(value.get(key), key, role) for key, role in VIEW_ROLES.items())
    if used != {"messages"} and (text is None or code is None):
        return None
    if (text is None) != (code is None):
        lone = "text" if code is None else "code"
        raise UserError(f"explicit view '{lone}' stands alone; give both 'text' and 'code' or neither")
    return None if text is None or code is None else ((text, code),)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, str) for each in value)


def _check_view(value: Any, key: str, role: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"'{key}' is {type(value).__name__}, expected a string or a list of one message")
    if len(value) != 1 or not isinstance(value[0], dict) or value[0].get("role") != role:
        raise UserError(f"'{key}' must hold exactly one {role} message, or be a string")
    if not isinstance(value[0].get("content"), str):
        raise UserError(f"'{key}'[0].content must be a string")
    return str(value[0]["content"])


class BadRecords:
    """The lines of a file that are passed over because something is wrong with them.

    Attributes:
        count: how many, each counted once however often the file is read.
        lines: numbers of the first few of them.
        first: what is wrong with the first few of them, each with file and line.
    """

    most = 3

    def __init__(self) -> None:
        self.count = 0
        self.lines: list[int] = []
        self.first: list[str] = []
        self._last = 0

    def note(self, error: UserError, line: int | None = None) -> None:
        """Pass over a line or a row; those of a file come in their order. Errors may lack its number."""
        line = line or error.line or 0
        if line <= self._last:
            return
        self._last = line
        self.count += 1
        if len(self.first) < self.most:
            self.lines.append(line)
            self.first.append(one_line(error))

    def describe(self) -> str:
        """One line for people."""
        more = self.count - len(self.first)
        rest = f"; and {more:,} more" if more else ""
        lines = "line" if self.count == 1 else "lines"
        return f"{self.count:,} bad {lines} left out (--bad_records skip): {'; '.join(self.first)}{rest}"

    def to_dict(self) -> dict[str, Any]:
        """For ``run.json``: nothing that depends on where the file lies."""
        return {"left_out": self.count, "first_lines": list(self.lines)}


def bad_records(choice: str) -> BadRecords | None:
    """What takes the bad records of one file, by ``--bad_records``; None where they are errors."""
    return BadRecords() if choice == "skip" else None


def tell_bad_records(bad: BadRecords | None) -> None:
    """Say on standard error how many lines of a file were left out, and the first of them."""
    if bad is not None and bad.count:
        print(f"note: {bad.describe()}", file=sys.stderr)


Data = str | os.PathLike[str] | Iterable[Record | dict[str, Any]]
"""A file of records, a folder or hub name that ``datasets`` loads, a ``datasets.Dataset``, dicts or ``Record``."""


def as_records(values: Iterable[Record | dict[str, Any]]) -> Iterator[Record]:
    """Records from memory: dicts in the form of a file's lines, or records as they are."""
    if isinstance(values, Mapping):
        raise UserError(
            f"expected records, got an object with the keys {', '.join(map(str, values))}; pass one of them"
        )
    for position, value in enumerate(values, start=1):
        yield value if isinstance(value, Record) else parse_record(value, line=position)


Views = Callable[[Record], Iterable[tuple[str, str]]]
"""A record to its pairs of source and target view."""
