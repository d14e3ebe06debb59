"""Thoughts: what a model writes between think tags before it answers."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAMES = "think|thinking|thought|reasoning|seed:think|longcat_think"
_PAIRS = (
    *((f"<{name}>", f"</{name}>") for name in _NAMES.split("|")),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
_CLOSING = dict(_PAIRS)
_OPENING = {closing: opening for opening, closing in _PAIRS}
TAGS = tuple(tag for pair in _PAIRS for tag in pair)
_TAG = re.compile("|".join(map(re.escape, TAGS)))


class Thought(NamedTuple):
    """The range ``[start, end)`` of a thought in a content, in characters, and the first character of the answer."""

    start: int
    end: int
    answer: int


def thought_in(content: str, *, opened: bool = False) -> Thought | None:
    """Find the thought at the beginning of a content; None if there is none.

    With ``opened`` the prompt has written the opening tag, so a content may begin inside the thought.
    """
    first = _TAG.search(content)
    if first is None:
        return None
    if first[0] in _OPENING:
        start, end, closing = 0, first.start(), first[0]
        if not opened:
            return None
    elif content[: first.start()].strip():
        return None
    else:
        start, closing = first.end(), _CLOSING[first[0]]
        end = content.find(closing, start)
        if end < 0:
            return None
    return Thought(start, end, end + len(closing))


class Tag(NamedTuple):
    """The last think tag of a text: its text, its first character, and whether it is still open."""

    text: str
    start: int
    is_open: bool

    @property
    def closing(self) -> str:
        """The tag that ends the thought."""
        return _CLOSING.get(self.text, self.text)


def last_tag(text: str, begin: int = 0) -> Tag | None:
    """Find the last opening tag of a text behind ``begin``; None if there is none."""
    last: Tag | None = None
    for match in _TAG.finditer(text, begin):
        if match[0] in _CLOSING:
            last = Tag(match[0], match.start(), True)
        elif last is not None and last.closing == match[0]:
            last = last._replace(is_open=False)
    return last


def ends_in_thought(prompt: str) -> bool:
    """Return whether a prompt ends in an opening think tag, so that the model continues with a thought."""
    return prompt.rstrip().endswith(tuple(_CLOSING))


def may_end_in_tag(text: str) -> bool:
    """Return whether a prompt that ends in ``text`` may end inside a thought, see :func:`ends_in_thought`."""
    return any(tag.endswith(text.rstrip()) or text.rstrip().endswith(tag) for tag in _CLOSING)


def has_tag(text: str) -> bool:
    """Return whether a text has a think tag."""
    return _TAG.search(text) is not None


def without_thought(content: str) -> str:
    """Return an answer without its thought and the white space behind it."""
    thought = thought_in(content)
    return content if thought is None else content[thought.answer :].lstrip()
