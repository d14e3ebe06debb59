"""How tokens look on a terminal and in pictures: in colours where there are some, with marks where there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console


class Colours(NamedTuple):
    """The colours of a kind of tokens.

    Attributes:
        meaning: the kind in words.
        strong: for squares of a matrix.
        shades: for the backgrounds of tokens, taken in turn.
        sixteen: on terminals with sixteen colours, where shades would all become the same.
    """

    meaning: str
    strong: str
    shades: tuple[str, str]
    sixteen: str


COLOURS = {
    "shared": Colours("shared by several sequences", "#7b6fb8", ("#c2bbe6", "#dedaf3"), "magenta"),
    "main": Colours("main text", "#4c78a8", ("#9ecae1", "#c9dff0"), "cyan"),
    "source": Colours("source view", "#f58518", ("#fdae6b", "#fdd3a8"), "yellow"),
    "target": Colours("target view", "#54a24b", ("#a1d99b", "#cbebc6"), "green"),
}
READ = "◂"
"""Behind what is read."""
EDGE = "│"
"""Between tokens that colours do not tell apart, and between branches."""

_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible_text(text: str) -> str:
    """A text with white space made visible and everything else that can't be printed escaped."""
    shown = text.translate(_VISIBLE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in shown)


class Look:
    """The styles of one console.

    Args:
        console: whose colours they are; ``NO_COLOR`` and ``TERM=dumb`` mean none.

    Attributes:
        coloured: kinds have colours.
        shaded: neighbouring tokens have different shades; where they have none, ``EDGE`` stands between them.
    """

    def __init__(self, console: Console) -> None:
        system = None if console.no_color else console.color_system
        self.coloured = system is not None
        self.shaded = system in ("256", "truecolor")

    def token(self, kind: str, number: int = 0, *, read: bool = False) -> str:
        """The style of a token of a kind, the ``number``-th of its neighbours."""
        style = ""
        if self.shaded:
            style = f"#000000 on {COLOURS[kind].shades[number % 2]}"
        elif self.coloured:
            style = f"black on {COLOURS[kind].sixteen}"
        return f"{style} bold underline".strip() if read else style

    def key(self, kind: str) -> str:
        """The style of a key of the attention matrix."""
        if not self.coloured:
            return ""
        return COLOURS[kind].strong if self.shaded else COLOURS[kind].sixteen
