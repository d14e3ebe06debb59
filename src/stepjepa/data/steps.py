"""Where the reasoning steps of a text are."""

from __future__ import annotations

import re
from typing import NamedTuple

SEPARATORS = {
    # A blank line may hold spaces; several blank lines in a row are one separator. It begins with the first of its
    # spaces: to try each of them would take a time that is quadratic in how many there are.
    "blank": r"(?<![ \t])(?:[ \t]*\r?\n){2,}",
    "line": r"(?<![ \t])(?:[ \t]*\r?\n)+",
}


class Step(NamedTuple):
    """Characters ``start`` to ``end`` of the text it was found in, the separator that closes it included."""

    start: int
    end: int


def separator_pattern(separator: str) -> re.Pattern[str]:
    """The regular expression of a separator.

    Args:
        separator: ``"blank"`` (blank lines), ``"line"`` (line ends) or a literal string, repeats of which count once.

    Raises:
        ValueError: the literal string is empty.
    """
    if separator in SEPARATORS:
        return re.compile(SEPARATORS[separator])
    if not separator:
        raise ValueError("step separator: expected 'blank', 'line' or a non-empty string, got an empty string")
    return re.compile(f"(?:{re.escape(separator)})+")


def find_steps(text: str, separator: str = "blank") -> list[Step]:
    """Split a text into steps that cover it without gaps.

    The separator belongs to the step that it closes; one at the very start belongs to the first step. White space
    alone is no step. The tokens of a step are those that begin inside ``[start, end)``, which holds also where a
    tokenizer fuses a full stop with the blank line behind it.

    Args:
        text: the assistant's content, nothing of the chat template around it.
        separator: see :func:`separator_pattern`.

    Returns:
        The steps in order; none for a text of white space.
    """
    pattern = separator_pattern(separator)
    steps: list[Step] = []
    # Where the next step begins, and where what has not been looked at does: white space may stand between them.
    start = seen = 0
    for match in pattern.finditer(text):
        if text[seen : match.start()].strip():
            steps.append(Step(start, match.end()))
            start = match.end()
        elif steps:
            steps[-1] = steps[-1]._replace(end=match.end())
            start = match.end()
        seen = match.end()
    if text[seen:].strip():
        steps.append(Step(start, len(text)))
    elif steps:
        steps[-1] = steps[-1]._replace(end=len(text))
    return steps
