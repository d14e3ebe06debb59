"""Records: one row or JSON line each, checked; every error names file, line and field."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepjepa.base.errors import UserError, one_line, shown

ROLES = ("system", "user", "assistant")

USER = ("prompt", "question", "instruction", "input", "text")
ASSISTANT = ("completion", "answer", "response", "output", "code")
"""Columns as data sets and other tools call them; the first one that a row has is taken."""

CHATS = ("messages", "conversations")
"""Columns of whole chats: with ``role`` and ``content``, or ShareGPT's ``from`` and ``value``."""

_SHAREGPT = {"human": "user", "gpt": "assistant"}
_VIEW_ROLES = {"text": "user", "code": "assistant"}
MOST_NAMES = 12
"""Columns that a message lists."""

Columns = Sequence[str] | None
"""Names of two columns, of the user's and of the assistant's message; None looks for the usual ones."""


@dataclass(frozen=True, slots=True)
class Record:
    """One example as read from a file.

    A message is a dict with ``role`` (``system``, ``developer``, ``user``, ``assistant`` or ``tool``) and ``content``,
    a text. Only where the data has them: ``reasoning_content``, a text; ``tool_calls``, a list of ``{"type":
    "function", "function": {"name": ..., "arguments": {...}}}``; ``name`` and ``tool_call_id``, texts; ``weight``,
    always 0: the turn of an assistant that is context and not trained. The last message is an assistant's that is
    trained.
    """

    messages: tuple[dict[str, Any], ...]
    views: tuple[tuple[str, str], ...] | None = None  # explicit pairs of source and target view
    path: str = "<memory>"  # of its file, or a label where it came from memory
    line: int = 0  # its line there, counted from 1
    extra: dict[str, Any] = field(default_factory=dict)  # the other fields of the line, untouched
    columns: tuple[str, ...] = ("messages",)  # of the line, which the chat was made of
    tools: list[dict[str, Any]] | None = None  # descriptions of functions, as templates read them
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template, for this record
    unused: tuple[str, ...] = ()  # keys of messages that nothing reads, as ``messages[].id``
    dropped: int = 0  # messages that stood behind the last trained answer

    @property
    def chat(self) -> tuple[Any, ...]:
        """All that a template renders: messages, tools and variables. Records of equal chats have equal texts."""
        return self.messages, self.tools, self.chat_template_kwargs

    @property
    def answer(self) -> str:
        """The content of the last assistant message: what the model must learn to say."""
        return str(self.messages[-1]["content"])


Data = str | os.PathLike[str] | Iterable[Record | dict[str, Any]]
"""A file of records, a folder or hub name that ``datasets`` loads, a ``datasets.Dataset``, dicts or ``Record``."""

Views = Callable[[Record], Iterable[tuple[str, str]]]
"""A record to its pairs of source and target view."""


def as_records(values: Iterable[Record | dict[str, Any]]) -> Iterator[Record]:
    """Records from memory: dicts in the form of a file's lines, or records as they are."""
    if isinstance(values, Mapping):
        keys = ", ".join(map(str, values))
        raise UserError(f"expected records, got an object with the keys {keys}; pass one of them")
    for position, value in enumerate(values, start=1):
        yield value if isinstance(value, Record) else parse_record(value, line=position)


def parse_record(
    value: Mapping[str, Any], path: str | os.PathLike[str] = "<memory>", line: int = 0, columns: Columns = None
) -> Record:
    """Check one object and make a record of it; ``path`` and ``line``, counted from 1, are for errors.

    It has ``messages``: optionally one system message first, then user and assistant in turn; or the chat in another
    form, see :func:`to_messages`. Optionally explicit views: ``views``, a list of pairs of texts; or ``text`` and
    ``code``, each a text or a list of one message.
    """
    try:
        messages, used = to_messages(value, columns)
        _check_turns([message["role"] for message in messages])
        views = _check_views(value, used)
    except UserError as error:
        raise UserError(str(error), path=path, line=line) from None
    extra = {key: value[key] for key in value if key not in {*used, "views", *_VIEW_ROLES}}
    return Record(tuple(messages), views, str(path), line, extra, tuple(name for name in value if name in used))


def describe_columns(record: Record) -> str | None:
    """The columns that a record of a table is made of, and the record; None where its file has ``messages``."""
    if record.columns == ("messages",):
        return None
    turns = [f"{message['role']} {shown(message['content'])}" for message in record.messages[:3]]
    return f"{', '.join(record.columns)}; line {record.line} is {', '.join(turns)}"


def to_messages(
    row: Mapping[str, Any], columns: Columns = None, *, system: str | None = None, system_prompt: str | None = None
) -> tuple[list[dict[str, Any]], set[str]]:
    """The chat of a row, and the columns that it was taken from.

    Without ``columns`` that is a whole chat (:data:`CHATS`), or the first of :data:`USER` and of :data:`ASSISTANT` that
    the row has; in Alpaca's form ``instruction`` goes on with ``input``. ``system`` is a column, ``system_prompt`` the
    same text for all rows.
    """
    if columns is not None and len(columns) != 2:
        raise UserError(f"--columns: expected two names, USER ASSISTANT, got {' '.join(columns)}")
    whole = next((name for name in CHATS if row.get(name) is not None), None) if columns is None else None
    if whole is not None:
        messages, used = _turns(row, whole, None), {whole}
    else:
        names = (USER, ASSISTANT) if columns is None else [(name,) for name in columns]
        asked, answered = (_column(row, each) for each in names)
        messages, used = _turns(row, asked, "user"), {asked, answered}
        if columns is None and asked == "instruction" and "input" in row:
            used.add("input")
            if row["input"] not in (None, ""):
                messages[0]["content"] += f"\n\n{_text(row, 'input')}"
        messages += _turns(row, answered, "assistant")
    if system is not None:
        system_prompt = _text(row, _column(row, (system,)))
        used.add(system)
    if system_prompt is not None:
        rest = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": system_prompt}, *rest]
    return messages, used


def _column(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of some columns that a row has."""
    for name in names:
        if name in row:
            return name
    missing = f"no column '{names[0]}'"
    if len(names) > 1:
        missing = f"no 'messages', and none of the columns {', '.join(names)}"
    there = ", ".join(list(map(str, row))[:MOST_NAMES]) or "nothing"
    raise UserError(f"{missing} (there is {there}); name the two with --columns USER ASSISTANT")


def _turns(row: Mapping[str, Any], name: str, role: str | None) -> list[dict[str, Any]]:
    """A column as messages: a text of one role or, as TRL also takes them, a list of turns."""
    turns = row[name]
    if role is not None and not (isinstance(turns, list) and any(isinstance(each, Mapping) for each in turns)):
        return [{"role": role, "content": _text(row, name)}]
    if not isinstance(turns, list | tuple):
        raise UserError(f"'{name}' must be a list of messages with 'role' and 'content', or 'from' and 'value'")
    return [_message(turn, f"{name}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: Any, name: str) -> dict[str, Any]:
    known = turn if isinstance(turn, Mapping) else {}
    role, content = known.get("role", known.get("from")), known.get("content", known.get("value"))
    role = _SHAREGPT.get(str(role), role)
    if known.get("tool_calls") or role == "tool":
        raise UserError(f"{name} is part of a tool call, and those are not supported; remove the record")
    if role not in ROLES or not isinstance(content, str):
        expected = f"'role', one of {', '.join(ROLES)}, and 'content', a text"
        raise UserError(f"{name} is {shown(turn)}; expected {expected}")
    # A system prompt may be empty on purpose (it switches a template's default off).
    if role != "system" and not content.strip():
        raise UserError(f"{name}.content ({role}) is empty; fill it or remove the record")
    return {"role": role, "content": content}


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    # A table of numbers is read as numbers, where a file of texts would have held their digits.
    number = isinstance(value, int) and not isinstance(value, bool)
    if number or (isinstance(value, float) and not math.isnan(value)):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        told = f"column '{name}' is {shown(value)}; expected a text"
        raise UserError(f"{told}; fill it in, or leave such rows out with --bad_records skip")
    return value


def _check_turns(roles: Sequence[str]) -> None:
    turns = roles[roles[:1] == ["system"] :]
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        told = (", ".join(roles[:8]) or "none") + (", ..." if len(roles) > 8 else "")
        expected = "user and assistant in turn, assistant last, and a system message only in front"
        raise UserError(f"the turns are {told}; expected {expected}")


def _check_views(value: Mapping[str, Any], used: set[str]) -> tuple[tuple[str, str], ...] | None:
    pairs = value.get("views")
    if pairs is not None:
        listed = isinstance(pairs, list | tuple) and all(isinstance(pair, list | tuple) for pair in pairs)
        if not listed or not all(len(pair) == 2 and all(isinstance(each, str) for each in pair) for pair in pairs):
            raise UserError("'views' must be a list of pairs of texts: [[source, target], ...]")
        return tuple((source, target) for source, target in pairs)
    # A table's columns of these names are the chat itself.
    text, code = (None if key in used else _view(value.get(key), key, role) for key, role in _VIEW_ROLES.items())
    if text is not None and code is not None:
        return ((text, code),)
    if used == {"messages"} and (text, code) != (None, None):
        raise UserError("one of the explicit views 'text' and 'code' stands alone; give both or neither")
    return None


def _view(value: Any, key: str, role: str) -> str | None:
    """A text, or the content of a list of one message, as in the published files."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and value[0].get("role") == role:
        value = value[0].get("content", 0)
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"'{key}' must be a string, or a list of exactly one {role} message")


class BadRecords:
    """What becomes of the lines of a file that something is wrong with (``--bad_records``): an error, or skipped."""

    def __init__(self, choice: str = "error") -> None:
        self.skips = choice == "skip"
        self.count = 0
        self.first: list[tuple[int, str]] = []  # the first few lines, and what is wrong there

    def note(self, error: UserError, line: int) -> None:
        """Raise the error, or skip a line or a row."""
        if not self.skips:
            raise error from None
        self.count += 1
        if self.count <= 3:
            self.first.append((line, one_line(error)))

    def describe(self) -> str:
        """One line for people."""
        rest = [f"and {self.count - 3:,} more"] if self.count > 3 else []
        told = "; ".join([told for _, told in self.first] + rest)
        lines = "line" if self.count == 1 else "lines"
        return f"{self.count:,} bad {lines} skipped (--bad_records skip): {told}"

    def tell(self) -> None:
        """Say on standard error how many lines were skipped, and the first of them; nothing if none was."""
        if self.count:
            print(f"note: {self.describe()}", file=sys.stderr)

    def to_dict(self) -> dict[str, Any]:
        """For ``run.json``: nothing that depends on where the file lies."""
        return {"left_out": self.count, "first_lines": [line for line, _ in self.first]}


_SEPARATORS = {
    # A blank line may hold spaces. A separator begins with the first of them: to try each would take quadratic time.
    "blank": r"(?<![ \t])(?:[ \t]*\r?\n){2,}",
    "line": r"(?<![ \t])(?:[ \t]*\r?\n)+",
}


def find_steps(text: str, separator: str = "blank") -> list[tuple[int, int]]:
    """Split an assistant's content into reasoning steps that cover it without gaps; white space alone is no step.

    Of each step the characters at which it begins and ends. The separator is ``blank`` (lines), ``line`` (ends) or a
    literal string; repeats count once. It belongs to the step that it closes; one at the very start to the first step.
    """
    pattern = re.compile(_SEPARATORS.get(separator) or f"(?:{re.escape(separator)})+")
    ends = [*(match.span() for match in pattern.finditer(text)), (len(text), len(text))]
    steps: list[tuple[int, int]] = []
    seen = 0  # where what has not been looked at begins
    for end, after in ends:
        if text[seen:end].strip():
            steps.append((steps[-1][1] if steps else 0, after))
        elif steps:
            steps[-1] = (steps[-1][0], after)
        seen = after
    return steps
