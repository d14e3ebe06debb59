"""The wording of NL-RX-Synth: phrases that a grammar puts together clumsily, and how the published set says them."""

from __future__ import annotations

# Replaced one after the other, everywhere in a description.
_SMOOTHER = (
    ("lines a", "lines with a"),
    ("lines not the", "lines not having the"),
    ("lines the", "lines with the"),
    ("lines not a", "lines not having a"),
    ("lines words", "lines with words"),
    ("containing not", "not containing"),
    ("lines with words with not a", "lines with words that don't have a"),
    ("lines with words with not", "lines with words that don't"),
    ("not not", "not"),
    ("lines either", "lines having either"),
    ("lines <having>", "lines having"),
    ("<having> ", ""),
    ("words with containing", "words that contain"),
)


def smooth(description: str) -> str:
    """A description as a person might say it, or nearly so."""
    for clumsy, smoother in _SMOOTHER:
        description = description.replace(clumsy, smoother)
    return description
