"""What a blank line must not cut in the text of a response: code fences, display mathematics, LaTeX environments.

All closings are looked for once, so that a hundred thousand openings without one take no longer than one does.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict

_OPENING = re.compile(
    r"^[ \t]*(?:(?P<fence>```|~~~)|(?P<dollars>\$\$)|(?P<bracket>\\\[)|\\begin\{(?P<name>[a-z]+\*?)\})", re.M
)
_FENCE_END = re.compile(r"^[ \t]*(?P<fence>```|~~~)[ \t]*$", re.M)
# A display ends with the first of these, or not at all where more than marks stands behind it.
_DISPLAY_END = {
    "$$": re.compile(r"(?=\$\$(?P<tail>[ \t.,]*$)?)", re.M),
    "\\]": re.compile(r"\\\](?P<tail>[ \t.,]*$)?", re.M),
}
_ENVIRONMENT_END = re.compile(r"\\end\{(?P<name>[a-z]+\*?)\}[ \t.,]*$", re.M)
_MARKS = " \t.,"


def find_blocks(text: str) -> list[tuple[int, int]]:
    """First and one past the last character of each block, with the blanks in front of its first line.

    Args:
        text: with line ends of one character.
    """
    if not _OPENING.search(text):
        return []
    # For each kind where its ends begin and end; a display that can't be closed by the next one ends at -1.
    ends: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for match in _FENCE_END.finditer(text):
        ends[match["fence"]].append(match.span())
    for match in _ENVIRONMENT_END.finditer(text):
        ends[f"\\end{{{match['name']}}}"].append(match.span())
    for mark, pattern in _DISPLAY_END.items():
        for match in pattern.finditer(text):
            tail = match.end("tail")
            ends[mark].append((match.start(), tail))
    blocks: list[tuple[int, int]] = []
    position = 0
    for opening in _OPENING.finditer(text):
        if opening.start() < position:
            continue
        found = ends.get(_closing(opening), [])
        place = bisect_left(found, (opening.end(), -1))
        if place < len(found) and found[place][1] >= 0:
            position = found[place][1]
            blocks.append((opening.start(), position))
    return blocks


def is_block(text: str) -> bool:
    """Whether a text is a block and nothing else.

    Args:
        text: without white space around it.
    """
    opening = _OPENING.match(text)
    if opening is None:
        return False
    closing = _closing(opening)
    if opening["fence"]:
        start = text.rfind("\n") + 1
        return start > opening.end() and text[start:].strip(" \t") == closing
    if opening["name"]:
        return text.rstrip(_MARKS).endswith(closing) and text.rfind(closing) >= opening.end()
    start = text.find(closing, opening.end())
    return start >= 0 and not text[start + len(closing) :].strip(_MARKS)


def _closing(opening: re.Match[str]) -> str:
    """What ends a block."""
    if opening["name"]:
        return f"\\end{{{opening['name']}}}"
    return opening["fence"] or ("$$" if opening["dollars"] else "\\]")
