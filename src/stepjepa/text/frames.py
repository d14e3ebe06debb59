"""Chats as text, and chats of like roles written without running their template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Trimming = Callable[[str], str] | None
"""What is done to the ends of a content; None for nothing."""


class Rendered(NamedTuple):
    """A chat as text.

    Attributes:
        text: the rendered chat.
        spans: for each message, first and one past the last character of its content in ``text``; ``(0, 0)`` for a
            message that the template leaves out.
        turn_ends: for each message, one past the last character of what ends its turn; the content's end where the
            template closes the turn with no special token.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    turn_ends: tuple[int, ...]


class Frame(NamedTuple):
    """What a template writes around the contents of chats of like roles.

    Attributes:
        first: the text in front of the first content.
        parts: for each message how the template trims its content, what stands between it and the next, how long that
            is, and how many characters of it still belong to the turn.
    """

    first: str
    parts: tuple[tuple[Trimming, str, int, int], ...]

    def fill(self, contents: Sequence[str]) -> Rendered | None:
        """The chat with these contents; None where one is blank or would be trimmed."""
        written, spans, ends = [self.first], [], []
        position = len(self.first)
        for content, (trim, behind, size, turn) in zip(contents, self.parts, strict=True):
            length = len(content)
            if content.isspace() or not length or (trim is not None and len(trim(content)) != length):
                return None
            end = position + length
            spans.append((position, end))
            ends.append(end + turn)
            written.append(content)
            written.append(behind)
            position = end + size
        return Rendered("".join(written), tuple(spans), tuple(ends))
