"""What a ``Jepa`` reads: the inputs of an embedder, bare texts or records, and its options; questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.chat.marks import Message
from stepjepa.data.columns import ASSISTANT, CHATS, USER
from stepjepa.data.messages import from_json, is_absent, read_message
from stepjepa.data.records import Record, as_records

PLACEHOLDER = "."
"""Stands for an answer that is never read."""


@dataclass(frozen=True, slots=True)
class Text:
    """A bare text to embed, with its place in a file for error messages."""

    text: str
    path: str = "<memory>"
    line: int = 0  # counted from 1


Inputs = Iterable[str | Text | Record | JsonObject]
"""Texts, or records: ``Record``, dicts with ``messages``, a data frame, a ``datasets.Dataset``."""


def as_inputs(values: Any, *, open_chats: bool) -> list[Text] | list[Record]:
    """Convert :data:`Inputs` to texts or to records.

    With ``open_chats`` a chat may end in the user's turn, as a question does that has no answer yet.

    Raises:
        ValueError: a single text, or texts among records.
        UserError: a record is wrong.
    """
    if isinstance(values, str):
        raise ValueError("inputs: expected a list of texts or of records, got one text; put it into a list")
    # Tables iterate over their columns.
    is_table = hasattr(values, "columns") or hasattr(values, "column_names")
    items: list[Any] = []
    if not is_table:
        items.extend(values)
    texts = [isinstance(item, str | Text) for item in items]
    if any(texts):
        if not all(texts):
            place = texts.index(False)
            raise ValueError(f"inputs: expected texts alone or records alone, got no text at index {place}")
        return [Text(item, line=line) if isinstance(item, str) else item for line, item in enumerate(items, start=1)]
    return list(as_records(values if is_table else items, change=with_answer if open_chats else None))


def with_answer(row: Any) -> Any:
    """Append a placeholder answer, which is never read, to a row that has none: its chat ends in a user's turn.

    The question may also be in a separate column. Any other value is returned unchanged.
    """
    if not isinstance(row, Mapping):
        return row
    name = next((column for column in CHATS if not is_absent(row.get(column))), None)
    if name is None:
        has_question, has_answer = (any(not is_absent(row.get(name)) for name in names) for names in (USER, ASSISTANT))
        return {**row, ASSISTANT[0]: PLACEHOLDER} if has_question and not has_answer else row
    try:
        chat = from_json(row[name], name, "a list of messages")
    except UserError:  # the reader of the record says so
        return row
    last = chat[-1] if isinstance(chat, list) and chat else None
    if not isinstance(last, Mapping) or (last.get("role") or last.get("from")) not in ("user", "human"):
        return row
    return {**row, name: [*chat, {"role": "assistant", "content": PLACEHOLDER}]}


Chat = str | Sequence[Message]
"""A question to a model: a text, or the messages of a chat up to the turn to be generated."""


def as_chats(questions: Iterable[Chat]) -> list[list[Message]]:
    """Convert questions to chats, whose messages are read as those of records.

    Raises:
        ValueError: a single text in place of a list, or a chat without messages.
        UserError: a message is wrong.
    """
    if isinstance(questions, str):
        raise ValueError("questions: expected a list of questions, got one text; put it into a list")
    chats: list[list[Message]] = [
        [{"role": "user", "content": question}] if isinstance(question, str) else _chat(question)
        for question in questions
    ]
    if not all(chats):
        raise ValueError("question: expected a text or messages, got an empty list")
    return chats


def _chat(messages: Sequence[Message]) -> list[Message]:
    """Return messages in the form of a record, and print the keys that are not read."""
    parsed = [read_message(turn, f"question[{number}]") for number, turn in enumerate(messages)]
    if unused := dict.fromkeys(key for _, keys in parsed for key in keys):
        note(f"not used: {', '.join(f'question[].{key}' for key in unused)}")
    return [message for message, _ in parsed]


class EmbedOptions(TypedDict, total=False):
    """Options of :meth:`Jepa.embedder`, which describes them."""

    batch_size: int
    raw: bool
    layer: int | None
    pooling: Literal["last", "mean"] | None
    max_length: int | None
