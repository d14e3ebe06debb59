"""Read training and test files: one JSON line becomes one record, and every error names file and line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.files import read_jsonl

ROLES = ("system", "user", "assistant")
VIEW_ROLES = {"text": "user", "code": "assistant"}


@dataclass(frozen=True, slots=True)
class Record:
    """One example as read from a file.

    Attributes:
        messages: the chat, each a dict with the keys ``role`` and ``content``.
        text: explicit source view, where the file gives one.
        code: explicit target view, where the file gives one.
        path: the file it came from, or a label where it came from memory.
        line: its line there, counted from 1.
        extra: the other fields of the line, untouched (``ground_truth``, ``answer`` ...).
    """

    messages: tuple[dict[str, str], ...]
    text: str | None = None
    code: str | None = None
    path: str = "<memory>"
    line: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        """The content of the last assistant message: what the model must learn to say."""
        return self.messages[-1]["content"]


def _fail(message: str, path: object, line: int) -> UserError:
    return UserError(message, path=path, line=line)


def _check_message(message: Any, position: int, path: object, line: int) -> dict[str, str]:
    name = f"messages[{position}]"
    if not isinstance(message, dict):
        raise _fail(f"{name} is {type(message).__name__}, expected an object with 'role' and 'content'", path, line)
    for key in ("role", "content"):
        if key not in message:
            raise _fail(f"{name} has no '{key}'; add it", path, line)
        if not isinstance(message[key], str):
            raise _fail(f"{name}.{key} is {type(message[key]).__name__}, expected a string", path, line)
    if message["role"] not in ROLES:
        raise _fail(f"{name}.role is '{message['role']}', expected one of {', '.join(ROLES)}", path, line)
    # A system prompt may be empty on purpose (it switches a template's default off); nothing else may.
    if message["role"] != "system" and not message["content"].strip():
        raise _fail(f"{name}.content ({message['role']}) is empty; fill it or remove the record", path, line)
    return {"role": message["role"], "content": message["content"]}


def _check_view(value: Any, key: str, role: str, path: object, line: int) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fail(f"'{key}' is {type(value).__name__}, expected a string or a list of one message", path, line)
    if len(value) != 1 or not isinstance(value[0], dict) or value[0].get("role") != role:
        raise _fail(f"'{key}' must hold exactly one {role} message, or be a string", path, line)
    if not isinstance(value[0].get("content"), str):
        raise _fail(f"'{key}'[0].content must be a string", path, line)
    return str(value[0]["content"])


def parse_record(value: dict[str, Any], path: str | os.PathLike[str] = "<memory>", line: int = 0) -> Record:
    """Check one object and make a record of it.

    Args:
        value: a dict with ``messages``: optionally one system message first, then user and assistant in turn,
            an assistant message last; optionally ``text`` and ``code`` as explicit views, each a string or, as in the
            published files, a list of one message (``text`` of the user, ``code`` of the assistant).
        path: for error messages.
        line: for error messages, counted from 1.

    Raises:
        UserError: the object does not have that form.
    """
    messages = value.get("messages")
    if messages is None:
        hint = (
            "; this looks like a raw file: run 'stepjepa prepare gsm8k' or 'stepjepa prepare steps' first"
            if "question" in value
            else "; expected {'messages': [{'role': ..., 'content': ...}, ...]}"
        )
        raise _fail(f"no field 'messages'{hint}", path, line)
    if not isinstance(messages, list | tuple) or not messages:
        raise _fail("'messages' must be a list with at least one user and one assistant message", path, line)
    checked = tuple(_check_message(message, position, path, line) for position, message in enumerate(messages))
    turns = [message["role"] for message in checked if message["role"] != "system"]
    if any(message["role"] == "system" for message in checked[1:]):
        raise _fail("a system message that is not the first; move it to the front", path, line)
    for role in ("user", "assistant"):
        if role not in turns:
            raise _fail(f"'messages' has no {role} message; every record needs one", path, line)
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise _fail(
            f"the turns are {', '.join(turns)}; expected user and assistant in turn, assistant last", path, line
        )
    views = {key: _check_view(value.get(key), key, role, path, line) for key, role in VIEW_ROLES.items()}
    if (views["text"] is None) != (views["code"] is None):
        lone = "text" if views["code"] is None else "code"
        raise _fail(f"explicit view '{lone}' stands alone; give both 'text' and 'code' or neither", path, line)
    extra = {key: value[key] for key in value if key not in ("messages", "text", "code")}
    return Record(checked, views["text"], views["code"], str(path), line, extra)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """All records of a JSON lines file.

    Raises:
        UserError: the file is missing or empty, or one of its lines is wrong.
    """
    records = [parse_record(value, path, line) for line, value in read_jsonl(path, "data file")]
    if not records:
        raise UserError("holds no records; expected one JSON object per line", path=Path(path))
    return records


def as_records(values: Iterable[Record | dict[str, Any]]) -> Iterator[Record]:
    """Records from memory: dicts in the form of a file's lines, or records as they are."""
    for position, value in enumerate(values, start=1):
        yield value if isinstance(value, Record) else parse_record(value, line=position)
