"""Forms: the text that a chat template writes around the contents of chats with the same roles.

Most chats of a data set differ only in their contents. So the turns of one chat of probe texts are made slowly, by
marks (``chat.marks``), and those of further chats with the same roles by replacing the probes by their contents. The
result is compared with the text that the template writes for the chat. If the two differ, as for a template that looks
into a content, the turns of the chat are made slowly, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.chat.growth import MARK
from stepjepa.chat.marks import Message, Span
from stepjepa.chat.thought import has_tag, may_end_in_tag
from stepjepa.chat.turn_text import Render, Turn

_MOST_FORMS = 1000  # most forms that are remembered

# Private-use characters: no template writes them.
_PROBE = "\ue000c{}\ue001"
_PROBES = re.compile(_PROBE.format(r"(\d+)"))
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")

SlowTurns = Callable[[Sequence[Message], Sequence[int]], list[Turn]]
# The roles of a chat up to its last turn, the indices of its turns, and the role of the message behind the last one.
_Key = tuple[tuple[str, ...], tuple[int, ...], str | None]


class _TurnForm(NamedTuple):
    """The text of a template around the content of a turn's message."""

    probe: Turn  # the turn of the probe chat
    lead: int  # number of characters of the answer in front of the content
    tail: str  # the text behind the content, up to the stop token

    def filled(self, text: str, spans: tuple[Span, ...]) -> Turn:
        """Return the turn in the text of another chat, with the spans of its contents."""
        start, end = spans[-1]
        answer = start - self.lead
        return self.probe._replace(text=text[:end] + self.tail, answer=answer, spans=spans, own=((start, end),))


class _Form(NamedTuple):
    """The text of a template around the contents of a chat, up to the message of its last turn."""

    written: list[str]  # the text in front of each content, and behind the last one; with marks if there are any
    has_marks: bool
    pieces: list[str]  # the same without marks
    messages: list[int]  # the indices of the messages whose contents the template writes
    turns: list[_TurnForm]


class Forms:
    """Makes the turns of plain chats, whose messages have only a role and a content, without tools.

    Args:
        render: renders such chats.
        slow_turns: makes turns of a chat by marks.
        only_adds_text: the text of every chat begins with that of the chat's beginning, see ``chat.growth``.
    """

    def __init__(self, render: Render, slow_turns: SlowTurns, *, only_adds_text: bool) -> None:
        self._render, self._slow_turns, self._only_adds_text = render, slow_turns, only_adds_text
        self._forms: dict[_Key, _Form | None] = {}
        self._met_once: set[_Key] = set()

    def turns(self, chat: Sequence[Message], indices: Sequence[int]) -> list[Turn] | None:
        """Return the turns of a normalised chat; None if they must be made by marks."""
        if not indices or not all(map(_is_plain, chat[: indices[-1] + 1])):
            return None
        groups = [indices] if self._only_adds_text else [[index] for index in indices]
        roles = tuple([message["role"] for message in chat[: indices[-1] + 2]])
        forms = [self._form((roles[: group[-1] + 1], tuple(group), (*roles, None)[group[-1] + 1])) for group in groups]
        turns: list[Turn] = []
        for group, form in zip(groups, forms, strict=True) if None not in forms else ():
            group_turns = None if form is None else self._filled(form, chat[: group[-1] + 1], group)
            if group_turns is None:
                return None
            turns += group_turns
        return turns or None

    def _form(self, key: _Key) -> _Form | None:
        if key not in self._met_once:
            # Most long chats are the only ones with their roles, so a form is learned from the second chat on.
            if len(self._met_once) < _MOST_FORMS:
                self._met_once.add(key)
            return None
        if key not in self._forms:
            self._forms[key] = self._learned(key)
        return self._forms[key]

    def _learned(self, key: _Key) -> _Form | None:
        """Return the form of chats with the roles of ``key``; None if there is none."""
        roles, indices, following = key
        messages = [
            {"role": role, "content": _PROBE.format(number)}
            for number, role in enumerate([*roles, *([following] if following else [])])
        ]
        chat, has_marks = messages[: len(roles)], len(indices) > 1
        try:
            turns = self._slow_turns(messages, indices)
            text = self._render(chat, marked=has_marks)
        except UserError:
            return None  # raised again for the chat itself
        parts = _PROBES.split(text)
        written, places = parts[::2], [int(number) for number in parts[1::2]]
        if places != sorted(set(places)):
            return None  # contents change their order, or one is written twice
        around = [_TurnForm(turn, turn.spans[-1][0] - turn.answer, turn.text[turn.spans[-1][1] :]) for turn in turns]
        form = _Form(written, has_marks, [piece.replace(MARK, "") for piece in written], places, around)
        for index, turn in zip(indices, around, strict=True):
            before = form.pieces[places.index(index)] if index in places else ""
            # Each answer begins in the text of the template, and no content decides whether it begins in a thought.
            if not 0 <= turn.lead <= len(before) or may_end_in_tag(before[: len(before) - turn.lead]):
                return None
        return form if self._filled(form, chat, indices) == turns else None

    def _filled(self, form: _Form, chat: Sequence[Message], indices: Sequence[int]) -> list[Turn] | None:
        """Return the turns of a chat by its form; None if the template writes another text."""
        contents = [chat[number]["content"] for number in form.messages]
        text, spans, place = _joined(form.pieces, contents), [(0, 0)] * len(chat), 0
        for number, piece, content in zip(form.messages, form.pieces, contents, strict=False):
            start = place + len(piece)
            place = start + len(content)
            spans[number] = (start, place)
        prompt = text[: spans[indices[-1]][0] - form.turns[-1].lead]
        written = _joined(form.written, contents) if form.has_marks else text
        try:
            as_written = self._render(chat, marked=form.has_marks) == written
            if not as_written or self._render(chat[:-1], prompt=True) != prompt:
                return None
        except UserError:
            return None  # raised again by the slow way
        return [turn.filled(text, tuple(spans[: index + 1])) for index, turn in zip(indices, form.turns, strict=True)]


def _joined(pieces: Sequence[str], contents: Sequence[str]) -> str:
    """Return pieces of text with contents between them."""
    return "".join(chain.from_iterable(zip(pieces, contents, strict=False))) + pieces[-1]


def _is_plain(message: Message) -> bool:
    """Return whether a message is a role and a content without outer white space, thought or private-use character."""
    content = message["content"]
    return (
        len(message) == 2
        and isinstance(content, str)
        and content.strip() == content != ""
        and (content.isascii() or not _PRIVATE.search(content))
        and not (message["role"] == "assistant" and has_tag(content))
    )
