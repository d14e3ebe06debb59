"""Code, displays and LaTeX environments in a text: a blank line inside one of them separates no steps."""

import re
from collections.abc import Sequence

_OPENING = re.compile(r"\s*(```|~~~|\$\$|\\\[|\\begin\{[a-z]+\*?\})")
_CLOSING = re.compile(r"```|~~~|\$\$|\\\]|\\end\{[a-z]+\*?\}")


def lines_in_blocks(lines: Sequence[str]) -> set[int]:
    """Return the numbers of the lines, from 0, in code fences, displays and LaTeX environments.

    A mark that nothing closes, such as a lone ``$$`` or the fence of an answer that was cut off, begins no block.
    """
    last_closing = {mark: number for number, line in enumerate(lines) for mark in _CLOSING.findall(line)}
    inside: set[int] = set()
    end = ""  # the mark that closes the block
    for number, line in enumerate(lines):
        remainder, opening = line, None if end else _OPENING.match(line)
        if opening:
            mark = opening[1].replace("\\[", "\\]").replace("\\begin", "\\end")
            remainder = line[opening.end() :]
            if mark in remainder or last_closing.get(mark, -1) > number:
                end = mark
        if end:
            inside.add(number)
            end = "" if end in remainder else end
    return inside
