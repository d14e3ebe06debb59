"""How tokens and segments of a record look: in colours where there are some, with marks where there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepjepa.inspection.record import SegmentInfo

if TYPE_CHECKING:
    from rich.console import Console

# For each kind two hues, taken in turn, so that neighbours of one kind can be told apart.
STRONG = {"main": ("#4c78a8", "#7b6fb8"), "source": ("#f58518", "#d64f5f"), "target": ("#54a24b", "#2f9e9e")}
# Two shades of each hue, taken in turn by the tokens of a segment.
SHADES = {
    "main": (("#9ecae1", "#c9dff0"), ("#c2bbe6", "#dedaf3")),
    "source": (("#fdae6b", "#fdd3a8"), ("#f4a3ab", "#f9ccd1")),
    "target": (("#a1d99b", "#cbebc6"), ("#93d5d5", "#c4e9e9")),
}
# The hues of terminals with sixteen colours, where shades would all become the same.
SIXTEEN = {
    "main": ("cyan", "bright_cyan"),
    "source": ("yellow", "bright_yellow"),
    "target": ("green", "bright_green"),
}
MEANING = {"main": "main text", "source": "source view", "target": "target view"}
READ = "◂"
"""Behind what is read."""
EDGE = "│"
"""Between tokens, and between segments, that colours do not tell apart."""

_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible_text(text: str) -> str:
    """A text with white space made visible and everything else that can't be printed escaped."""
    shown = text.translate(_VISIBLE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in shown)


def name_of(segment: SegmentInfo) -> str:
    """A segment by its number and kind."""
    return f"{segment.index} {segment.kind}"


def hues(segments: Sequence[SegmentInfo]) -> list[int]:
    """Which of its kind's two hues each segment has."""
    met: Counter[str] = Counter()
    result = []
    for segment in segments:
        result.append(met[segment.kind] % 2)
        met[segment.kind] += 1
    return result


class Look:
    """The styles of one console.

    Args:
        console: whose colours they are; ``NO_COLOR`` and ``TERM=dumb`` mean none.
        segments: of the record.

    Attributes:
        coloured: segments have colours.
        shaded: tokens of a segment have shades, too; where they have none, ``EDGE`` stands between them.
    """

    def __init__(self, console: Console, segments: Sequence[SegmentInfo]) -> None:
        system = None if console.no_color else console.color_system
        self.coloured = system is not None
        self.shaded = system in ("256", "truecolor")
        self._hues = hues(segments)

    def token(self, segment: SegmentInfo, offset: int = 0, *, read: bool = False) -> str:
        """The style of a segment's token, counted from 0."""
        style = ""
        if self.shaded:
            style = f"#000000 on {SHADES[segment.kind][self._hues[segment.index]][offset % 2]}"
        elif self.coloured:
            style = f"black on {SIXTEEN[segment.kind][self._hues[segment.index]]}"
        return f"{style} bold underline".strip() if read else style

    def key(self, segment: SegmentInfo) -> str:
        """The style of a key of the attention matrix."""
        if not self.coloured:
            return ""
        return (STRONG if self.shaded else SIXTEEN)[segment.kind][self._hues[segment.index]]
