"""Colours of tokens on a terminal and in pictures."""

from __future__ import annotations

from typing import NamedTuple

from stepjepa.drawing import PALETTE


class Colours(NamedTuple):
    """The colours of a kind of tokens."""

    meaning: str  # the kind in words
    strong: str  # for pictures
    shades: tuple[str, str]  # terminal backgrounds of neighbouring tokens; distinct also with sixteen colours


COLOURS = {
    "shared": Colours("shared by several sequences", PALETTE[3], ("magenta", "bright_magenta")),
    "main": Colours("main text", PALETTE[0], ("cyan", "bright_cyan")),
    "source": Colours("source view", PALETTE[4], ("yellow", "bright_yellow")),
    "target": Colours("target view", PALETTE[2], ("green", "bright_green")),
}
READ = "◂"
"""Behind a token whose state is read."""
EDGE = "│"
"""Between tokens where there are no colours."""

_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible_text(text: str) -> str:
    """A text with white space made visible and unprintable characters escaped."""
    shown = text.translate(_VISIBLE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in shown)


def token_style(kind: str, number: int = 0, *, read: bool = False) -> str:
    """The terminal style of a token of a kind, the ``number``-th of its neighbours."""
    style = f"black on {COLOURS[kind].shades[number % 2]}"
    return f"{style} bold underline" if read else style
