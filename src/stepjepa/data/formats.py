"""Rows as others keep them to ``messages``: whole chats, prompt and completion, instructions, questions and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepjepa.errors import UserError

USER = ("prompt", "question", "instruction", "input", "text")
ASSISTANT = ("completion", "answer", "response", "output", "code")
"""Columns as data sets and other tools call them; the first one that is there is taken."""

INSTRUCTION, INPUT = "instruction", "input"
"""Of Alpaca's form: what is to be done, and what with, which may be empty. Both are the user's message."""

CHATS = ("messages", "conversations")
"""Columns of whole chats: with ``role`` and ``content``, or ShareGPT's ``from`` and ``value``."""

ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names; others are the same."""

MOST_NAMES = 12
"""Columns that a message lists."""

Columns = tuple[str, str] | None
"""Names of the columns of the user's and the assistant's message; None looks for the usual ones."""


def to_messages(
    row: Mapping[str, Any], columns: Columns = None, *, system: str | None = None, system_prompt: str | None = None
) -> tuple[list[dict[str, Any]], set[str]]:
    """The chat of a row.

    Args:
        row: by the names of its columns.
        columns: see :data:`Columns`; None takes a whole chat (:data:`CHATS`), or ``instruction`` with ``input``, or the
            first of :data:`USER` and of :data:`ASSISTANT` that the row has.
        system: column of the system prompt; None for none.
        system_prompt: the same for all rows.

    Returns:
        The messages, and the columns that they were taken from.

    Raises:
        UserError: a column is missing, or holds no text.
    """
    whole = next((name for name in CHATS if name in row), None) if columns is None else None
    if whole is not None:
        messages, used = _chat(whole, row[whole]), {whole}
    else:
        user, assistant = columns or (None, None)
        asked, used = _asked(row, user)
        answer = _column(row, assistant, ASSISTANT)
        messages = [*asked, *_turns(row, answer, "assistant")]
        used.add(answer)
    if system is not None:
        system_prompt = _content(row, _column(row, system, ()))
        used.add(system)
    if system_prompt is not None:
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages, used


def _column(row: Mapping[str, Any], named: str | None, usual: tuple[str, ...]) -> str:
    """The name of a column: the one that was named, or the first of the usual ones."""
    there = list(map(str, row))
    for name in usual if named is None else (named,):
        if name in there:
            return name
    listed = ", ".join(there[:MOST_NAMES])
    missing = "none of the columns " + ", ".join(usual) if named is None else f"no column '{named}'"
    wanted = "no 'messages', and " if named is None else ""
    raise UserError(f"{wanted}{missing} (there is {listed or 'nothing'}); name the two with --columns USER ASSISTANT")


def _asked(row: Mapping[str, Any], user: str | None) -> tuple[list[dict[str, Any]], set[str]]:
    """What comes before the answer, and its columns."""
    if user is None and INSTRUCTION in row and not any(name in row for name in USER[: USER.index(INSTRUCTION)]):
        more = [] if row.get(INPUT) in (None, "") else [_content(row, INPUT)]
        text = "\n\n".join([_content(row, INSTRUCTION), *more])
        return [{"role": "user", "content": text}], {INSTRUCTION, INPUT}
    name = _column(row, user, USER)
    return _turns(row, name, "user"), {name}


def _turns(row: Mapping[str, Any], name: str, role: str) -> list[dict[str, Any]]:
    """A column as messages: a text, or, as TRL also takes them, a list of turns."""
    if isinstance(row[name], list) and row[name] and isinstance(row[name][0], Mapping):
        return _chat(name, row[name])
    return [{"role": role, "content": _content(row, name)}]


def _content(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    # A table of numbers is read as numbers, where a file of texts would have held their digits.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        kind = "nothing" if value is None else type(value).__name__
        raise UserError(f"column '{name}' holds {kind}; expected a text")
    if not value.strip():
        raise UserError(f"column '{name}' is empty; fill it in, or leave such rows out with --bad_records skip")
    return value


def _chat(name: str, turns: Any) -> list[dict[str, Any]]:
    """The messages of a column of whole chats."""
    found = []
    for turn in turns if isinstance(turns, list) else [None]:
        known = turn if isinstance(turn, Mapping) else {}
        role, content = known.get("role", known.get("from")), known.get("content", known.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"column '{name}' holds no list of turns with 'role' and 'content', or 'from' and 'value'")
        found.append({"role": ROLES.get(role, role), "content": content})
    return found
