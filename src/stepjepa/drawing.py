"""What pictures have in common."""

from __future__ import annotations


def drawable(text: str, family: str) -> str:
    """A text with a box for what a font has no glyph for, which Matplotlib would warn of.

    Args:
        text: any.
        family: of the font.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=family)))
    return "".join(character if font.get_char_index(ord(character)) else "▯" for character in text)
