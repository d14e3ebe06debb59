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
_TAG = re.compile("|".join(re.escape(tag) for pair in _PAIRS for tag in pair))


class Thought(NamedTuple):
    """Where a content holds a thought: its first and one past its last character, and where the answer begins."""

    start: int
    end: int
    answer: int


def thought_in(content: str, *, opened: bool = False) -> Thought | None:
    """The thought that stands in front of a content; None if there is none.

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
    """The think tag that a text ends in or has closed: what it is, where it begins, and whether it is still open."""

    text: str
    start: int
    is_open: bool

    @property
    def closing(self) -> str:
        """The tag that ends the thought."""
        return _CLOSING.get(self.text, self.text)


def last_tag(text: str, begin: int = 0) -> Tag | None:
    """The last opening tag of a text behind ``begin``; None if there is none."""
    last: Tag | None = None
    for found in _TAG.finditer(text, begin):
        if found[0] in _CLOSING:
            last = Tag(found[0], found.start(), True)
        elif last is not None and last.closing == found[0]:
            last = last._replace(is_open=False)
    return last


def ends_in_thought(prompt: str) -> bool:
    """Whether a prompt ends in an opening think tag, so that the model goes on with a thought."""
    tag = last_tag(prompt)
    return tag is not None and tag.is_open and not prompt[tag.start + len(tag.text) :].strip()


def without_thought(content: str) -> str:
    """What an answer says behind its thought, without the white space between the two."""
    thought = thought_in(content)
    return content if thought is None else content[thought.answer :].lstrip()
