"""``stepjepa prepare chat``: training records of any table with questions and answers, or with whole chats."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from stepjepa.commands.preparation import Preparation, add_source_and_target, open_job, write_records
from stepjepa.errors import UserError
from stepjepa.preparing.conversion import convert_rows

USER = ("prompt", "question", "instruction", "input", "text")
ASSISTANT = ("completion", "answer", "response", "output", "code")
"""Columns as data sets and other tools call them, the first one that is there is taken."""

INSTRUCTION, INPUT = "instruction", "input"
"""Of Alpaca's form: what is to be done, and what with, which may be empty. Both are the user's message."""

CHATS = ("messages", "conversations")
"""Columns of whole chats: with ``role`` and ``content``, or ShareGPT's ``from`` and ``value``."""

ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names; others are the same."""

MOST_NAMES = 12
"""Columns that a message lists."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_and_target(parser, "rows with a column of questions and one of answers, or with one of whole chats")
    columns = parser.add_argument_group(
        "columns", "Without --user: 'messages' or 'conversations' as they are; 'instruction' and 'input' together."
    )
    columns.add_argument("--user", metavar="NAME", help=f"of what is asked (the first of {', '.join(USER)})")
    columns.add_argument("--assistant", metavar="NAME", help=f"of the answers (the first of {', '.join(ASSISTANT)})")
    columns.add_argument("--system", metavar="NAME", help="of a system prompt for each row (none)")
    columns.add_argument("--system_prompt", metavar="TEXT", help="one system prompt for all rows (none)")


def _chosen(row: Mapping[str, Any], named: str | None, usual: tuple[str, ...], flag: str) -> str:
    """The name of a column.

    Raises:
        UserError: there is none.
    """
    there = list(map(str, row))
    for name in usual if named is None else (named,):
        if name in there:
            return name
    listed = ", ".join(there[:MOST_NAMES])
    missing = "none of the columns " + ", ".join(usual) if named is None else f"no column '{named}'"
    raise UserError(f"{missing}; name one with --{flag} (there is {listed})")


def _content(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    # A table of numbers is read as numbers, where a file of texts would have held their digits.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(
            f"column '{name}' holds {'nothing' if value is None else type(value).__name__}; expected a text"
        )
    if not value.strip():
        raise UserError(f"column '{name}' is empty; fill it in, or leave such rows out with --bad_records skip")
    return value


def _chat(name: str, turns: Any) -> list[dict[str, str]]:
    """The messages of a column of ``CHATS``.

    Raises:
        UserError: it is no list of turns with a role and a text.
    """
    found = []
    for turn in turns if isinstance(turns, list) else [None]:
        known = turn if isinstance(turn, Mapping) else {}
        role, content = known.get("role", known.get("from")), known.get("content", known.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"column '{name}' holds no list of turns with 'role' and 'content', or 'from' and 'value'")
        found.append({"role": ROLES.get(role, role), "content": content})
    return found


def _question(row: Mapping[str, Any], user: str | None) -> str:
    """What the user says."""
    if user is None and INSTRUCTION in row and not any(name in row for name in USER[: USER.index(INSTRUCTION)]):
        given = row.get(INPUT)
        more = [] if given is None or given == "" else [_content(row, INPUT)]
        return "\n\n".join([_content(row, INSTRUCTION), *more])
    return _content(row, _chosen(row, user, USER, "user"))


def make_record(
    row: Mapping[str, Any], *, user: str | None, assistant: str | None, system: str | None, system_prompt: str | None
) -> dict[str, Any]:
    """A training record of one row.

    Args:
        row: by the names of its columns.
        user: column of the user's message; None takes a whole chat (``CHATS``), or ``INSTRUCTION`` with ``INPUT``,
            or the first of ``USER`` that the row has.
        assistant: column of the assistant's message; None takes the first of ``ASSISTANT``.
        system: column of the system prompt; None for none.
        system_prompt: the same for all rows.

    Raises:
        UserError: a column is missing, or holds no text.
    """
    whole = next((name for name in CHATS if name in row), None) if user is None and assistant is None else None
    if whole is not None:
        messages = _chat(whole, row[whole])
    else:
        question = _question(row, user)
        answer = _content(row, _chosen(row, assistant, ASSISTANT, "assistant"))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if system is not None:
        system_prompt = _content(row, _chosen(row, system, (), "system"))
    if system_prompt is not None:
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": system_prompt})
    return {"messages": messages}


def _run(args: argparse.Namespace) -> int:
    if args.system is not None and args.system_prompt is not None:
        raise UserError("--system and --system_prompt both say what the system prompt is; leave one out")
    job = open_job(args)
    chosen = {name: getattr(args, name) for name in ("user", "assistant", "system", "system_prompt")}
    records, counts = convert_rows(
        job.rows, lambda row: make_record(row, **chosen), limit=job.limit, path=job.source, bad=job.bad
    )
    write_records(job, records, counts)
    return 0


CHAT = Preparation(
    "training records of any table with questions and answers, or with whole chats", _add_arguments, _run
)
