"""The reasoning steps of an answer."""

import re
from typing import NamedTuple


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
    first step.

    Args:
        text: the content of an assistant's message.
        separator: the separator of steps, as in ``JepaConfig.step_separator``.
    """
    named = _SEPARATORS.get(separator)
    pattern = re.compile(f"(?:{re.escape(separator)})+" if named is None else named.pattern)
    ends = [*(match.span() for match in pattern.finditer(text)), (len(text), len(text))]
    steps: list[tuple[int, int]] = []
    begin = 0  # of the text behind the last separator
    for end, after in ends:
        if text[begin:end].strip():
            steps.append((steps[-1][1] if steps else 0, after))
        elif steps:
            steps[-1] = (steps[-1][0], after)
        begin = after
    return steps


def closed_step(text: str, separator: str) -> str:
    """Return a step with a separator at its end, unless it has one; ``separator`` as in :func:`find_steps`."""
    closing = _SEPARATORS[separator].closing if separator in _SEPARATORS else separator
    return text if text.endswith(closing) else text + closing
