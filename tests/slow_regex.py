r"""A slow and obvious matcher of NL-RX's expressions, with a parser of its own: the judge of the quick one.

It follows the text of an expression and a line hand in hand: where may a match end that begins here? ``|``, ``&`` and
``~`` are union, intersection and complement of those places, ``\b`` looks at the characters on both sides.
"""

import string
from functools import cache

WORD = set(string.ascii_letters + string.digits + "_")


def matches(expression, line):
    """Whether the expression describes the whole line."""
    return len(line) in _Matcher(line).ends(_parse(expression), 0)


class _Matcher:
    def __init__(self, line):
        self.line = line
        self.ends = cache(self._ends)

    def is_word(self, place):
        return 0 <= place < len(self.line) and self.line[place] in WORD

    def _ends(self, node, start):
        """The places where a match may end that begins at ``start``."""
        kind, *parts = node
        here = self.line[start : start + 1]
        match kind:
            case "set":
                found = {start + 1} if here and parts[0](here) else set()
            case "boundary":
                found = {start} if self.is_word(start - 1) != self.is_word(start) else set()
            case "or":
                found = set().union(*(self.ends(part, start) for part in parts))
            case "and":
                found = set.intersection(*(set(self.ends(part, start)) for part in parts))
            case "not":
                found = set(range(start, len(self.line) + 1)) - self.ends(parts[0], start)
            case "then":
                found = self._one_after_the_other(parts, start)
            case "repeat":
                found = self._again_and_again(*parts, start)
        return frozenset(found)

    def _one_after_the_other(self, parts, start):
        places = {start}
        for part in parts:
            places = set().union(*(self.ends(part, place) for place in places))
        return places

    def _again_and_again(self, inner, least, most, start):
        places, found = frozenset({start}), frozenset({start} if least == 0 else ())
        seen = set()
        turn = 0
        # Beyond the lower bound the places only repeat, sooner or later.
        while turn != most and (turn < least or (places, turn < least) not in seen):
            seen.add((places, turn < least))
            places = frozenset().union(*(self.ends(inner, place) for place in places))
            turn += 1
            if turn >= least:
                found |= places
        return found


@cache
def _parse(text):
    node, rest = _either(text)
    assert rest == "", (text, rest)
    return node


def _either(text):
    parts = []
    while True:
        part, text = _both(text)
        parts.append(part)
        if text[:1] != "|":
            return ("or", *parts), text
        text = text[1:]


def _both(text):
    parts = []
    while True:
        part, text = _sequence(text)
        parts.append(part)
        if text[:1] != "&":
            return ("and", *parts), text
        text = text[1:]


def _sequence(text):
    parts = []
    while text and text[0] not in "|&)":
        part, text = _repeated(text)
        parts.append(part)
    return ("then", *parts), text


def _repeated(text):
    node, text = _negated(text)
    while text[:1] and text[0] in "*+?{":
        if text[0] == "{":
            inside, text = text[1:].split("}", 1)
            least, *most = inside.split(",")
            node = ("repeat", node, int(least), int(most[0]) if most and most[0] else None if most else int(least))
        else:
            node = ("repeat", node, int(text[0] == "+"), 1 if text[0] == "?" else None)
            text = text[1:]
    return node, text


def _negated(text):
    first, rest = text[0], text[1:]
    if first == "~":
        inner, rest = _negated(rest)
        node = ("not", inner)
    elif first == "(":
        node, rest = _either(rest)
        assert rest[0] == ")"
        rest = rest[1:]
    elif first == "[":
        inside, rest = rest.split("]", 1)
        node = ("set", _class_test(inside))
    elif text[:2] == r"\b":
        node, rest = ("boundary",), rest[1:]
    elif first == "\\":
        node, rest = ("set", _equal_to(rest[0])), rest[1:]
    else:
        node = ("set", _any if first == "." else _equal_to(first))
    return node, rest


@cache
def _equal_to(wanted):
    return lambda character: character == wanted


def _any(character):
    return character != "\n"


@cache
def _class_test(inside):
    negated, inside = inside[:1] == "^", inside.removeprefix("^")
    members = set()
    while inside:
        if inside[1:2] == "-" and inside[2:]:
            members.update(map(chr, range(ord(inside[0]), ord(inside[2]) + 1)))
            inside = inside[3:]
        else:
            members.add(inside[0])
            inside = inside[1:]
    return lambda character: character != "\n" and (character in members) != negated
