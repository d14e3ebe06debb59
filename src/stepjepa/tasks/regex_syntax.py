r"""The regular expressions of NL-RX, from text to a tree.

They are those of textbooks with two operators more, and describe whole lines::

    union         = intersection ('|' intersection)*
    intersection  = concatenation ('&' concatenation)*
    concatenation = repetition repetition*
    repetition    = complement ('*' | '+' | '?' | '{n}' | '{n,}' | '{n,m}')*
    complement    = '~' complement | atom
    atom          = '(' union ')' | '()' | '[' class ']' | '.' | '\b' | escape | character

The precedence is that of the automaton library with which the authors of the data compared expressions. An expression
means what it says, not what its description does: 575 of the 9863 published pairs lack brackets around a part.

``^`` and ``$`` are no characters of the dialect, since an expression describes a whole line anyway; with a backslash
they are themselves. ``\d``, ``\w`` and ``\s``, also in capitals, are classes of ASCII characters.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

# The published expressions have 54 characters at most, nested 6 deep.
LONGEST = 1000
DEEPEST = 60

_HIGHEST = 0x10FFFF

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points, ends included, in order and apart from each other."""


class RegexSyntaxError(ValueError):
    """A text that is no expression of the dialect; the message says where and why."""


class Characters(NamedTuple):
    """One character out of a set; a newline in it does not count, since no line holds one."""

    ranges: Ranges


class Boundary(NamedTuple):
    r"""``\b``: nothing, in a place with a word character on one side only; beyond the ends of a line there is none."""


class Concatenation(NamedTuple):
    """One part after the other; without parts the empty text."""

    parts: tuple[Node, ...]


class Union(NamedTuple):
    """What one of the parts describes."""

    parts: tuple[Node, ...]


class Intersection(NamedTuple):
    """What all parts describe."""

    parts: tuple[Node, ...]


class Complement(NamedTuple):
    """Whatever ``inner`` does not describe."""

    inner: Node


class Repetition(NamedTuple):
    """``inner`` from ``least`` to ``most`` times; without upper bound where ``most`` is None."""

    inner: Node
    least: int
    most: int | None


Node: TypeAlias = Characters | Boundary | Concatenation | Union | Intersection | Complement | Repetition


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    """The same code points as ranges in order that do not touch."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def _others(ranges: Ranges) -> Ranges:
    """The code points outside of ranges."""
    edges = [-1, *(edge for each in ranges for edge in each), _HIGHEST + 1]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((before + 1, after - 1) for before, after in gaps if before + 1 < after)


def _of(*pieces: str) -> Ranges:
    """Ranges from characters and from pairs of characters, the ends of a range."""
    return _merged([(ord(piece[0]), ord(piece[-1])) for piece in pieces])


WORD = _of("09", "AZ", "az", "_")
_CLASSES = {"d": _of("09"), "w": WORD, "s": _of(" ", "\t\r")}
_CLASSES |= {name.upper(): _others(ranges) for name, ranges in _CLASSES.items()}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
ANY = Characters(_others(_of("\n")))
# What has a meaning of its own, or would have to somebody who reads it, and is no character without a backslash.
_RESERVED = frozenset("|&~*+?{}()[].^$\\")
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_BOUNDS = re.compile(r"(?P<operator>[*+?])|\{(?P<least>[0-9]+)(?P<comma>,)?(?P<most>(?<=,)[0-9]+)?\}")


def parse(text: str) -> Node:
    """The tree of an expression.

    Args:
        text: without white space around it; white space inside counts.

    Raises:
        RegexSyntaxError: it is empty, has several lines, more than :data:`LONGEST` characters or brackets nested
            deeper than :data:`DEEPEST`, or is not of the dialect.
    """
    if len(text) > LONGEST:
        raise RegexSyntaxError(f"expected at most {LONGEST} characters, got {len(text)}")
    if "\n" in text:
        raise RegexSyntaxError("expected one line, got several")
    parser = _Parser(text)
    node = parser.union()
    if parser.position < len(text):
        raise parser.error("a ')' that closes nothing")
    return node


class _Parser:
    """Reads an expression from left to right, one method per rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

    def error(self, what: str) -> RegexSyntaxError:
        return RegexSyntaxError(f"{what} at character {self.position + 1}")

    def peek(self) -> str:
        """The next character, empty at the end."""
        return self.text[self.position : self.position + 1]

    def take(self, expected: str) -> bool:
        """Go past the next character if it is this one."""
        if self.peek() != expected:
            return False
        self.position += 1
        return True

    def union(self) -> Node:
        if self.depth > DEEPEST:
            raise self.error(f"brackets nested deeper than {DEEPEST}")
        parts = [self.intersection()]
        while self.take("|"):
            parts.append(self.intersection())
        return parts[0] if len(parts) == 1 else Union(tuple(parts))

    def intersection(self) -> Node:
        parts = [self.concatenation()]
        while self.take("&"):
            parts.append(self.concatenation())
        return parts[0] if len(parts) == 1 else Intersection(tuple(parts))

    def concatenation(self) -> Node:
        parts = []
        while self.peek() not in ("", "|", "&", ")"):
            parts.append(self.repetition())
        if not parts:
            raise self.error("nothing where an expression is needed")
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def repetition(self) -> Node:
        complements = 0
        while self.take("~"):
            complements += 1
        node = self.atom()
        if complements % 2:
            node = Complement(node)
        operators = 0
        while self.peek() in (*_REPEATS, "{"):
            operators += 1
            if operators > DEEPEST:
                raise self.error(f"more than {DEEPEST} repetitions of repetitions")
            node = Repetition(node, *self.bounds())
        return node

    def bounds(self) -> tuple[int, int | None]:
        found = _BOUNDS.match(self.text, self.position)
        if found is None:
            raise self.error("'{' without {n}, {n,} or {n,m}")
        if found["operator"]:
            least, most = _REPEATS[found["operator"]]
        else:
            least = int(found["least"])
            most = int(found["most"]) if found["most"] else None if found["comma"] else least
            if most is not None and most < least:
                raise self.error(f"bounds in the wrong order, {least} to {most}")
        self.position = found.end()
        return least, most

    def atom(self) -> Node:
        character = self.peek()
        if self.take("("):
            return self.bracket()
        if self.take("["):
            return self.character_class()
        if self.take("."):
            return ANY
        if self.text.startswith("\\b", self.position):
            self.position += 2
            return Boundary()
        if character == "\\":
            return Characters(self.escape())
        if character in _RESERVED or not character:
            raise self.error(f"'{character}' where a character is needed" if character else "nothing after '~'")
        self.position += 1
        return Characters(_of(character))

    def bracket(self) -> Node:
        if self.take(")"):
            return Concatenation(())
        self.depth += 1
        node = self.union()
        self.depth -= 1
        if not self.take(")"):
            raise self.error("no ')'")
        return node

    def escape(self) -> Ranges:
        self.position += 1
        character = self.peek()
        word = character.isalnum() or character == "_"
        if not character or (word and character not in _CLASSES and character not in _CONTROLS):
            raise self.error(f"'\\{character}', which means nothing,")
        self.position += 1
        return _CLASSES.get(character) or _of(_CONTROLS.get(character, character))

    def character_class(self) -> Node:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            first = self.class_member()
            if self.peek() == "-" and self.text[self.position + 1 : self.position + 2] != "]":
                self.position += 1
                last = self.class_member()
                if any(len(end) != 1 or end[0][0] != end[0][1] for end in (first, last)):
                    raise self.error("a range that ends in a class of characters")
                if last[0][0] < first[0][0]:
                    raise self.error(f"a range in the wrong order, {chr(first[0][0])} to {chr(last[0][0])},")
                ranges.append((first[0][0], last[0][0]))
            else:
                ranges.extend(first)
        if not ranges:
            raise self.error("'[]' without characters")
        return Characters(_others(_merged(ranges)) if negated else _merged(ranges))

    def class_member(self) -> Ranges:
        character = self.peek()
        if character == "":
            raise self.error("no ']'")
        if character == "\\":
            return self.escape()
        self.position += 1
        return _of(character)
