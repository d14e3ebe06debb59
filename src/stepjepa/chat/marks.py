"""Find the texts of messages in a chat rendered by a template.

Each text is marked, the chat is rendered once more, and the positions of the marks are read. Texts are not searched
for, since they may also occur in the template's text or in another message. A template's output may depend on the
texts, so the record's own texts are marked, and apart from the marks the output must be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.chat.thought import thought_in

Message = Mapping[str, Any]
Span = tuple[int, int]
Render = Callable[[Sequence[Message]], str]
Kind = Literal["content", "thought", "call"]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read an assistant's reasoning."""

# Private-use planes: no template writes their characters, and hardly any text contains them.
_PLANES = ((0xF0000, re.compile("[\U000f0000-\U000ffffd]")), (0x100000, re.compile("[\U00100000-\U0010fffd]")))


class Part(NamedTuple):
    """A text of a message, without the white space at its ends."""

    message: int  # index of its message
    kind: Kind  # a thought is the message's reasoning, in a field of its own or in think tags in front of the content
    text: str
    lead: str = ""  # the white space in front of it, which a template may strip
    trail: str = ""


class Place(NamedTuple):
    """A part and its span ``[start, end)`` in a rendered text; None if it is missing."""

    part: Part
    span: Span | None
    repeats: bool = False  # it is written more than once; the span is the last one


def locate(
    render: Render,
    messages: Sequence[Message],
    text: str,
    indices: Iterable[int],
    *,
    begin: int = 0,
    opened: str | None = None,
) -> list[Place]:
    """Find the parts of some messages in their rendered chat.

    If a template writes something else for marked texts, messages are marked one at a time. A text that still can't be
    marked is searched for: one of the last message must occur exactly once behind ``begin``, or in the whole text, and
    one of an earlier message exactly once in front of it, or in the whole text.

    Args:
        render: renders messages.
        messages: the chat.
        text: ``render(messages)``.
        indices: of the messages whose parts are found.
        begin: the place in ``text`` that separates unmarked texts of the last message from those of earlier ones.
        opened: the tag of a thought inside which a content may begin, see ``thought_in``.

    Returns:
        The places of the parts in the order of the messages; the span of a missing part is None.
    """
    chosen, marker = set(indices), _Marker(text, messages, opened)
    places = marker.locate(render, chosen)
    if places is not None:
        return places
    places = []
    for index in sorted(chosen):
        alone = marker.locate(render, {index})
        if alone is None:
            first = (begin, len(text)) if index == max(chosen) else (0, begin)
            ranges = [first, (0, len(text))] if begin else [(0, len(text))]
            alone = [Place(part, _only(text, part.text, ranges)) for part in marker.marked({index}, outside=False)[1]]
        places += alone
    return places


def contents(places: Sequence[Place], count: int) -> list[Span | None]:
    """Return the span of the content of each of ``count`` messages, without a thought before it; None if missing."""
    spans: list[Span | None] = [None] * count
    for part, span, _ in places:
        if part.kind == "content":
            spans[part.message] = span
    return spans


class Located(NamedTuple):
    """The places of all texts of a chat in its rendered text."""

    text: str
    places: list[Place]
    open_ends: frozenset[int]  # numbers of parts whose last white space may belong to the next part

    def beginning(self, text: str, count: int) -> list[Place] | None:
        """Return the places of the first ``count`` messages in their rendering ``text``.

        None unless the text of the chat begins with ``text``.
        """
        chosen = [number for number, place in enumerate(self.places) if place.part.message < count]
        spans = {number: span for number in chosen if (span := self.places[number].span) is not None}
        last = max(spans, key=lambda number: spans[number], default=None)
        if (
            not self.text.startswith(text)
            or last in self.open_ends
            or any(end > len(text) for _, end in spans.values())
        ):
            return None
        return [self.places[number] for number in chosen]


def locate_all(render: Render, messages: Sequence[Message], text: str, *, opened: str | None) -> Located | None:
    """Find the parts of all messages by one rendering, with the arguments of :func:`locate`.

    None if they can't be marked at once, or one of them occurs twice.
    """
    try:
        marker = _Marker(text, messages, opened)
    except UserError:
        return None
    places = marker.locate(render, set(range(len(messages))), once=True)
    if places is None:
        return None
    present = sorted((span, number) for number, (_, span, _) in enumerate(places) if span is not None)
    numbers = [number for _, number in present]
    ends = (n for n, following in pairwise(numbers) if places[n].part.trail and places[following].part.lead)
    return Located(text, places, frozenset(ends))


def _only(text: str, part: str, ranges: Sequence[Span]) -> Span | None:
    """Return the span of a part in the first range of a text that has it exactly once; None if none has."""
    for begin, end in ranges:
        start = text.find(part, begin, end)
        if start >= 0 and text.find(part, start + 1, end) < 0:
            return start, start + len(part)
    return None


class _Marker:
    """Marks the texts of a chat's messages with pairs of private-use characters."""

    def __init__(self, text: str, messages: Sequence[Message], opened: str | None) -> None:
        self.text, self.messages, self.opened = text, messages, opened
        free = [plane for plane in _PLANES if not plane[1].search(text)]
        if not free:
            raise UserError("the chat holds characters of both private-use planes (U+F0000 and above); remove them")
        self._first, self._pattern = free[0]

    def locate(self, render: Render, chosen: set[int], *, once: bool = False) -> list[Place] | None:
        """Return the places of the parts of some messages; None if marks change the template's output.

        Args:
            render: renders messages.
            chosen: indices of the messages.
            once: return None also if the template writes a part twice.
        """
        marked, parts = self.marked(chosen, outside=False)
        if not parts:
            return []
        try:
            inside = self._read(render(marked))
        except UserError:  # a template may refuse texts that it does not know
            return None
        if inside.text != self.text or (once and inside.repeats):
            return None
        spans = [inside.spans.get(number) for number in range(len(parts))]
        if any(part.lead or part.trail for part in parts):
            try:
                outside = self._read(render(self.marked(chosen, outside=True)[0]))
            except UserError:
                outside = None
            if outside is not None:
                spans = _with_white_space(parts, inside, outside)
        return [
            Place(part, span, number in inside.repeats)
            for number, (part, span) in enumerate(zip(parts, spans, strict=True))
        ]

    def marked(self, chosen: set[int], *, outside: bool) -> tuple[list[Message], list[Part]]:
        """Return the chat with marks around some messages' texts, ``outside`` or inside their outer white space."""
        parts: list[Part] = []

        def mark(text: str, kind: Kind) -> str:
            core = text.strip()
            if not core:
                return text
            start = len(text) - len(text.lstrip())
            lead, trail = text[:start], text[start + len(core) :]
            opening, closing = (chr(self._first + 2 * len(parts) + side) for side in (0, 1))
            parts.append(Part(index, kind, core, lead, trail))
            return f"{opening}{text}{closing}" if outside else f"{lead}{opening}{core}{closing}{trail}"

        chat: list[Message] = []
        for index, original in enumerate(self.messages):
            message = dict(original)
            if index in chosen:
                for key in REASONING_KEYS:
                    if isinstance(message.get(key), str):
                        message[key] = mark(message[key], "thought")
                content = message.get("content")
                if isinstance(content, str):
                    thought = thought_in(content, opened=self.opened) if message["role"] == "assistant" else None
                    if thought is None:
                        message["content"] = mark(content, "content")
                    else:
                        begin, end, answer = thought
                        inner = mark(content[begin:end], "thought")
                        outer = mark(content[answer:], "content")
                        message["content"] = content[:begin] + inner + content[end:answer] + outer
                if message.get("tool_calls"):
                    message["tool_calls"] = [_marked_call(call, mark) for call in message["tool_calls"]]
            chat.append(message)
        return chat, parts

    def _read(self, text: str) -> _Unmarked:
        """Take the marks out of a rendered text."""
        pieces, starts, spans = list[str](), dict[int, int](), dict[int, Span]()
        position, last, repeats = 0, 0, set[int]()
        for match in self._pattern.finditer(text):
            pieces.append(text[last : match.start()])
            position += match.start() - last
            last = match.end()
            number, closes = divmod(ord(match[0]) - self._first, 2)
            if not closes:
                starts[number] = position
            elif number in starts:
                if number in spans:
                    repeats.add(number)
                spans[number] = (starts[number], position)  # the last one, if a text is written twice
        pieces.append(text[last:])
        return _Unmarked("".join(pieces), spans, repeats)


class _Unmarked(NamedTuple):
    """A rendered text without its marks, and the span between the marks of each part."""

    text: str
    spans: dict[int, Span]
    repeats: set[int]  # numbers of the parts that are written more than once


def _marked_call(call: Any, mark: Callable[[str, Kind], str]) -> Any:
    """Mark the function's name and all texts among the arguments of a tool call."""

    def inner(value: Any) -> Any:
        if isinstance(value, str):
            return mark(value, "call")
        if isinstance(value, Mapping):
            return {key: inner(inner_value) for key, inner_value in value.items()}
        return [inner(item) for item in value] if isinstance(value, list) else value

    function = call.get("function")
    if not isinstance(function, Mapping):
        return {**call, **{key: inner(call[key]) for key in ("name", "arguments") if key in call}}
    return {
        **call,
        "function": {**function, **{key: inner(function[key]) for key in ("name", "arguments") if key in function}},
    }


def _with_white_space(parts: Sequence[Part], inside: _Unmarked, outside: _Unmarked) -> list[Span | None]:
    """Extend spans by the white space at the ends of the texts that the template keeps.

    Marks outside the white space protect it from being stripped, so the text between two parts is the template's own.
    With marks inside, the text between them also has the white space that the template keeps.
    """
    spans: list[Span | None] = [inside.spans.get(number) for number in range(len(parts))]
    order = sorted((span, number) for number, span in enumerate(spans) if span is not None)
    before, number_before = 0, None
    starts, ends = {}, {}
    for (start, end), number in [*order, ((len(inside.text), len(inside.text)), None)]:
        gap = inside.text[before:start]
        template_text = _between(outside, number_before, number)
        trail = "" if number_before is None else parts[number_before].trail
        lead = "" if number is None else parts[number].lead
        behind, ahead = _split(gap, trail, template_text, lead)
        if number_before is not None:
            ends[number_before] = before + behind
        if number is not None:
            starts[number] = start - ahead
        before, number_before = end, number
    return [None if span is None else (starts[number], ends[number]) for number, span in enumerate(spans)]


def _between(text: _Unmarked, first: int | None, second: int | None) -> str | None:
    """Return the text between two parts; None if one of them is missing."""
    if not {first, second} <= {None, *text.spans}:
        return None
    start = 0 if first is None else text.spans[first][1]
    end = len(text.text) if second is None else text.spans[second][0]
    return text.text[start:end]


def _split(gap: str, trail: str, middle: str | None, lead: str) -> tuple[int, int]:
    """Count the characters of ``trail`` and of ``lead`` around the template's own text in a gap."""
    if middle is not None:
        for behind in range(len(trail), -1, -1):
            ahead = len(gap) - behind - len(middle)
            if 0 <= ahead <= len(lead) and gap == trail[:behind] + middle + lead[len(lead) - ahead :]:
                return behind, ahead
    return 0, 0
