"""Thoughts: what a model writes between think tags before it answers."""

from __future__ import annotations

import re
from typing import NamedTuple

# Tags in angle brackets differ in prefixes and names: <think>, <seed:think>, <think:opensource>.
_ANGLED = r"(?:\w+:)?(?:think|thinking|thought|reasoning|longcat_think)(?::\w+)?>"
_CLOSING = {
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel>thought": "<channel|>",
    "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]",
}
_CLOSES = {*_CLOSING.values()}
_TAG = re.compile("|".join([f"</?{_ANGLED}", *map(re.escape, [*_CLOSING, *_CLOSES])]))
_LAST = re.compile("(?:" + "|".join([f"<{_ANGLED}", *map(re.escape, _CLOSING)]) + r")\Z")
_END_OF_TAG = re.compile(r"[\w:]*>")


def _closing(tag: str) -> str | None:
    """Return the tag that ends the thought that a tag opens; None for a tag that ends one."""
    if tag in _CLOSES or tag.startswith("</"):
        return None
    return _CLOSING.get(tag) or f"</{tag[1:]}"


class Thought(NamedTuple):
    """The range ``[start, end)`` of a thought in a content, in characters, and the first character of the answer."""

    start: int
    end: int
    answer: int


def thought_in(content: str, *, opened: str | bool | None = None) -> Thought | None:
    """Find the thought at the beginning of a content; None if there is none.

    Args:
        content: of a message.
        opened: the tag that the prompt ends in, or True for any tag; so the content may begin inside the thought.
    """
    first = _TAG.search(content)
    if first is None:
        return None
    closing = _closing(first[0])
    if closing is None:
        start, end, closing = 0, first.start(), first[0]
        # Another tag does not end this thought: it is part of the text.
        if not opened or (isinstance(opened, str) and closing != _closing(opened)):
            return None
    elif content[: first.start()].strip():
        return None
    else:
        start = first.end()
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
        return _closing(self.text) or self.text


def last_tag(text: str, begin: int = 0) -> Tag | None:
    """Find the last opening tag of a text behind ``begin``; None if there is none."""
    last: Tag | None = None
    for match in _TAG.finditer(text, begin):
        if _closing(match[0]) is not None:
            last = Tag(match[0], match.start(), True)
        elif last is not None and last.closing == match[0]:
            last = last._replace(is_open=False)
    return last


def opening_tag(prompt: str) -> str | None:
    """Return the opening think tag that a prompt ends in, so that the model continues with a thought; None without."""
    tag = _LAST.search(prompt.rstrip())
    return None if tag is None else tag[0]


def closing_tag(prompt: str) -> str | None:
    """Return the closing think tag that a prompt ends in; None without."""
    tags = [match[0] for match in _TAG.finditer(prompt)]
    return tags[-1] if tags and _closing(tags[-1]) is None and prompt.rstrip().endswith(tags[-1]) else None


def is_left_to_model(prompt: str, *, opened: bool) -> bool:
    """Return whether a prompt leaves the thought to the model; with ``opened`` it must open the thought."""
    tag = last_tag(prompt)
    return tag.is_open if tag is not None else not opened and closing_tag(prompt) is None


def may_end_in_tag(text: str) -> bool:
    """Return whether a prompt that ends in ``text`` may end inside a thought, see :func:`opening_tag`."""
    end = text.rstrip()
    is_end = any(tag.endswith(end) for tag in _CLOSING) or _END_OF_TAG.fullmatch(end) is not None
    return is_end or opening_tag(end) is not None


def has_tag(text: str) -> bool:
    """Return whether a text has a think tag."""
    return _TAG.search(text) is not None


def without_thought(content: str) -> str:
    """Return an answer without its thought and the white space behind it."""
    thought = thought_in(content)
    return content if thought is None else content[thought.answer :].lstrip()
