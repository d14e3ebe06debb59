r"""A slow and obvious matcher of NL-RX's expressions: the judge of the quick one.

It follows the tree of an expression and a line hand in hand: where may a match end that begins here? ``|``, ``&`` and
``~`` are union, intersection and complement of those places, ``\b`` looks at the characters on both sides.
"""

import string
from functools import cache

from stepjepa.tasks.regex_syntax import (
    Boundary,
    Characters,
    Complement,
    Concatenation,
    Intersection,
    Repetition,
    Union,
    parse,
)

WORD = set(string.ascii_letters + string.digits + "_")


def matches(expression, line):
    """Whether the expression describes the whole line."""

    def is_word(place):
        return 0 <= place < len(line) and line[place] in WORD

    def after(node, places):
        return frozenset().union(*(ends(node, place) for place in places))

    known = {}

    def ends(node, start):
        """The places where a match may end that begins at ``start``."""
        # By identity: trees of different operators are equal as tuples.
        key = id(node), start
        if key not in known:
            known[key] = find_ends(node, start)
        return known[key]

    def find_ends(node, start):
        match node:
            case Characters(ranges):
                here = start < len(line) and any(first <= ord(line[start]) <= last for first, last in ranges)
                found = frozenset({start + 1} if here else ())
            case Boundary():
                found = frozenset({start} if is_word(start - 1) != is_word(start) else ())
            case Union(parts):
                found = frozenset().union(*(ends(part, start) for part in parts))
            case Intersection(parts):
                found = frozenset.intersection(*(ends(part, start) for part in parts))
            case Complement(inner):
                found = frozenset(range(start, len(line) + 1)) - ends(inner, start)
            case Concatenation(parts):
                found = frozenset({start})
                for part in parts:
                    found = after(part, found)
            case Repetition(inner, least, most):
                places = frozenset({start})
                for _ in range(least):
                    places = after(inner, places)
                found = places
                # So many turns at most bring new places.
                for _ in range(len(line) + 1 if most is None else most - least):
                    places = after(inner, places)
                    found |= places
        return found

    return len(line) in ends(_parse(expression), 0)


_parse = cache(parse)
