"""A record: one example of training or evaluation, as it was read."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter

from stepjepa.base.json_object import JsonObject

READ_LATER = frozenset({"ground_truth", "group"})
"""Fields beside the chat that tasks and analyses read."""


@dataclass(frozen=True, slots=True)
class Record:
    """One example as read from a file.

    A message is a dict with ``role`` (``system``, ``developer``, ``user``, ``assistant`` or ``tool``) and ``content``,
    a text. If the data has them, also: ``reasoning_content``, a text; ``tool_calls``, a list of ``{"type":
    "function", "function": {"name": ..., "arguments": {...}}}``; ``name`` and ``tool_call_id``, texts; ``weight``,
    always 0: the turn of an assistant that is context and not trained. The last message is an assistant's that is
    trained.

    Attributes:
        messages: the chat, in the form above.
        views: explicit pairs of source and target view, as texts; None for those of the mode.
        path: the path of its file, or a label for records from memory.
        line: its line there, counted from 1.
        extra: the other fields of the line, unchanged.
        columns: columns of the line that the chat was made from.
        tools: descriptions of functions, as templates read them.
        chat_template_kwargs: variables of the template, for this record.
        unused: keys of messages that nothing reads, as ``messages[].id``.
        dropped: number of messages behind the last trained answer.
    """

    messages: tuple[JsonObject, ...]
    views: tuple[tuple[str, str], ...] | None = None
    path: str = "<memory>"
    line: int = 0
    extra: JsonObject = field(default_factory=dict)
    columns: tuple[str, ...] = ("messages",)
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    unused: tuple[str, ...] = ()
    dropped: int = 0

    def __reduce__(self) -> tuple[type["Record"], tuple[object, ...]]:
        """Pickle the fields alone: records are written to temporary files and read again, in half the time so."""
        return type(self), _FIELDS(self)

    @property
    def chat(self) -> tuple[tuple[JsonObject, ...], list[JsonObject] | None, JsonObject | None]:
        """All that a template renders: messages, tools and variables. Records of equal chats have equal texts."""
        return self.messages, self.tools, self.chat_template_kwargs

    @property
    def answer(self) -> str:
        """The content of the last assistant message."""
        return str(self.messages[-1]["content"])


_FIELDS: Callable[[Record], tuple[object, ...]] = attrgetter(*(attribute.name for attribute in fields(Record)))


Data = str | os.PathLike[str] | Iterable[Record | JsonObject]
"""A file of records, a folder or hub name that ``datasets`` loads, a ``datasets.Dataset``, dicts or ``Record``."""

Views = Callable[[Record], Iterable[tuple[str, str]]]
"""Function from a record to its pairs of source and target view."""
