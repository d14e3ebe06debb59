r"""A slow and obvious matcher of NL-RX's expressions: the judge of the quick one.

It follows the tree of an expression and a line hand in hand: where may a match end that begins here? ``|``, ``&`` and
``~`` are union, intersection and complement of those places, ``\b`` looks at the characters on both sides.
"""

import re
import string
from functools import cache

from stepjepa.tasks.regex_syntax import parse

WORD = set(string.ascii_letters + string.digits + "_")


def matches(expression, line):
    """Whether the expression describes the whole line."""

    def is_word(place):
        return 0 <= place < len(line) and line[place] in WORD

    def after(node, places):
        return frozenset().union(*(ends(node, place) for place in places))

    @cache
    def ends(node, start):
        """The places where a match may end that begins at ``start``."""
        parts, (least, most), places = node.parts, node.bounds, frozenset({start})
        match node.kind:
            case "characters":
                here = start < len(line) and re.fullmatch(node.text, line[start], re.ASCII)
                places = frozenset({start + 1} if here else ())
            case "boundary":
                places = frozenset({start} if is_word(start - 1) != is_word(start) else ())
            case "union":
                places = frozenset().union(*(ends(part, start) for part in parts))
            case "intersection":
                places = frozenset.intersection(*(ends(part, start) for part in parts))
            case "complement":
                places = frozenset(range(start, len(line) + 1)) - ends(parts[0], start)
            case "concatenation":
                for part in parts:
                    places = after(part, places)
            case "repetition":
                for _ in range(least):
                    places = after(parts[0], places)
                turn = places
                # So many turns at most bring new places.
                for _ in range(len(line) + 1 if most is None else most - least):
                    turn = after(parts[0], turn)
                    places |= turn
        return places

    return len(line) in ends(_parse(expression), 0)


_parse = cache(parse)
