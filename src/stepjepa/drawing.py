"""Colours and labels of figures."""

from __future__ import annotations

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8577")
"""Colours of series that colour-blind readers can tell apart (Okabe and Ito, without black and yellow, and a grey)."""


def drawable(text: str, family: str) -> str:
    """Replace characters that a font has no glyph for by a box, since Matplotlib would warn of them.

    Args:
        text: the text to draw.
        family: name of the font family.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=family)))
    return "".join(character if font.get_char_index(ord(character)) else "▯" for character in text)
