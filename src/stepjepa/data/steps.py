"""The reasoning steps of an answer."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from stepjepa.data.blocks import lines_in_blocks


class _Separator(NamedTuple):
    """A named separator of steps."""

    pattern: str  # regular expression of all its forms
    closing: str  # the form that closes a step


_SEPARATORS = {
    # A blank line may hold spaces. A separator begins with the first of them: to try each would take quadratic time.
    "blank": _Separator(r"(?<![ \t])(?:[ \t]*\r?\n){2,}", "\n\n"),
    "line": _Separator(r"(?<![ \t])(?:[ \t]*\r?\n)+", "\n"),
}


def find_steps(text: str, separator: str = "blank") -> list[tuple[int, int]]:
    """Split an assistant's content into reasoning steps that cover it without gaps; white space alone is no step.

    Returns the range ``[start, end)`` of each step, in characters. The separator is ``blank`` (lines), ``line`` (ends)
    or a literal string; repeats count once. It belongs to the step that it closes; one at the very start belongs to the
    first step. A blank line inside code, a display or a LaTeX environment is no separator, see :mod:`.blocks`.

    Args:
        text: the content of an assistant's message.
        separator: the separator of steps, as in ``JepaConfig.step_separator``.
    """
    named = _SEPARATORS.get(separator)
    pattern = re.compile(f"(?:{re.escape(separator)})+" if named is None else named.pattern)
    spans = [match.span() for match in pattern.finditer(text)]
    if separator == "blank" and spans:
        spans = _outside_blocks(text, spans)
    ends = [*spans, (len(text), len(text))]
    steps: list[tuple[int, int]] = []
    begin = 0  # of the text behind the last separator
    for end, after in ends:
        if text[begin:end].strip():
            steps.append((steps[-1][1] if steps else 0, after))
        elif steps:
            steps[-1] = (steps[-1][0], after)
        begin = after
    return steps


def _outside_blocks(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Leave out the blank lines, given by their range in characters, that are inside a block."""
    lines = text.split("\n")
    inside = lines_in_blocks(lines)
    if not inside:
        return list(spans)
    first_places = [0, *accumulate(len(line) + 1 for line in lines)]
    # The last character of a separator is the end of a blank line.
    return [span for span in spans if bisect_right(first_places, span[1] - 1) - 1 not in inside]


def closed_step(text: str, separator: str) -> str:
    """Return a step with a separator at its end, unless it has one; ``separator`` as in :func:`find_steps`."""
    closing = _SEPARATORS[separator].closing if separator in _SEPARATORS else separator
    return text if text.endswith(closing) else text + closing
