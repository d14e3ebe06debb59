"""What a ``Jepa`` reads: the inputs of an embedder, bare texts or records, and its options; questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from stepjepa.base.json_object import JsonObject
from stepjepa.chat.marks import Message
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
    if is_table:
        return list(as_records(values))
    return list(as_records([with_answer(item) if open_chats else item for item in items]))


def with_answer(value: Any) -> Any:
    """Append a placeholder answer, which is never read, to a row whose chat ends in a user's turn."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return value
    is_open = messages[-1].get("role") == "user"
    return {**value, "messages": [*messages, {"role": "assistant", "content": PLACEHOLDER}]} if is_open else value


Chat = str | Sequence[Message]
"""A question to a model: a text, or the messages of a chat up to the turn to be generated."""


def as_chats(questions: Iterable[Chat]) -> list[list[Message]]:
    """Convert questions to chats; ValueError for a single text in place of a list, or for a chat without messages."""
    if isinstance(questions, str):
        raise ValueError("questions: expected a list of questions, got one text; put it into a list")
    chats: list[list[Message]] = [
        [{"role": "user", "content": each}] if isinstance(each, str) else [*each] for each in questions
    ]
    if not all(chats):
        raise ValueError("question: expected a text or messages, got an empty list")
    return chats


class EmbedOptions(TypedDict, total=False):
    """Options of :meth:`Jepa.embedder`, which describes them."""

    batch_size: int
    raw: bool
    layer: int | None
    pooling: Literal["last", "mean"] | None
    max_length: int | None
