"""The reasoning steps of an answer."""

import re

_SEPARATORS = {
    # A blank line may hold spaces. A separator begins with the first of them: to try each would take quadratic time.
    "blank": r"(?<![ \t])(?:[ \t]*\r?\n){2,}",
    "line": r"(?<![ \t])(?:[ \t]*\r?\n)+",
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
    pattern = re.compile(_SEPARATORS.get(separator) or f"(?:{re.escape(separator)})+")
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
