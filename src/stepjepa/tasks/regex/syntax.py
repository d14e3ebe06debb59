r"""The regular expressions of NL-RX, from text to a tree.

They are those of textbooks with two operators more, and describe whole lines::

    union         = intersection ('|' intersection)*
    intersection  = concatenation ('&' concatenation)*
    concatenation = repetition repetition*
    repetition    = complement ('*' | '+' | '?' | '{n}' | '{n,}' | '{n,m}')*
    complement    = '~' complement | atom
    atom          = '(' union ')' | '()' | '[' class ']' | '.' | '\b' | escape | character

The order of binding is that of the automaton library with which the authors of the data compared expressions. The data
would allow others: operands of ``|`` and ``&`` always stand in brackets there, and so does that of ``~``. But 575 of
the 9863 published pairs lack the brackets around the whole, as ``.*([A-Za-z])|(.).*`` for "containing a letter or a
character", and only the order of binding says that this is not ``.*(([A-Za-z])|(.)).*``: an expression means what it
says, not what its description does.

``^`` and ``$`` are no characters of the dialect, since an expression describes a whole line anyway; with a backslash
they are themselves. ``\d``, ``\w`` and ``\s``, also in capitals, are classes of ASCII characters.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

# The published expressions have 54 characters at most, nested 6 deep.
LONGEST = 1000
DEEPEST = 60

_HIGHEST = 0x10FFFF
_NEWLINE = ord("\n")

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class RegexSyntaxError(ValueError):
    """A text that is no expression of the dialect; the message says where and why."""


class Characters(NamedTuple):
    """One character out of a set.

    Attributes:
        ranges: of code points, ends included, in order and apart from each other; never with the newline, which no
            line holds.
    """

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
    """``inner`` from ``least`` to ``most`` times; without end where ``most`` is None."""

    inner: Node
    least: int
    most: int | None


Node: TypeAlias = Characters | Boundary | Concatenation | Union | Intersection | Complement | Repetition


def _sorted_apart(ranges: list[tuple[int, int]]) -> Ranges:
    """The same code points as ranges in order that do not touch."""
    apart: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if apart and first <= apart[-1][1] + 1:
            apart[-1] = (apart[-1][0], max(apart[-1][1], last))
        else:
            apart.append((first, last))
    return tuple(apart)


def _others(ranges: Ranges) -> Ranges:
    """The code points outside of ranges."""
    gaps, start = [], 0
    for first, last in ranges:
        if start < first:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= _HIGHEST:
        gaps.append((start, _HIGHEST))
    return tuple(gaps)


def _of(*pieces: str) -> Ranges:
    """Ranges from characters and from pairs of characters, the ends of a range."""
    return _sorted_apart([(ord(piece[0]), ord(piece[-1])) for piece in pieces])


WORD = _of("09", "AZ", "az", "_")
_DIGIT, _SPACE = _of("09"), _of(" ", "\t\r")
_CLASSES = {"d": _DIGIT, "w": WORD, "s": _SPACE, "D": _others(_DIGIT), "W": _others(WORD), "S": _others(_SPACE)}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
ANY = Characters(_others(((_NEWLINE, _NEWLINE),)))
# What has a meaning of its own, or would have to somebody who reads it, and is no character without a backslash.
_RESERVED = frozenset("|&~*+?{}()[].^$\\")
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


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
    node = parser.union(0)
    if parser.position < len(text):
        raise parser.fail("a ')' that closes nothing")
    return node


class _Parser:
    """Reads an expression from left to right, one method per rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def fail(self, what: str) -> RegexSyntaxError:
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

    def union(self, depth: int) -> Node:
        if depth > DEEPEST:
            raise self.fail(f"brackets nested deeper than {DEEPEST}")
        parts = [self.intersection(depth)]
        while self.take("|"):
            parts.append(self.intersection(depth))
        return parts[0] if len(parts) == 1 else Union(tuple(parts))

    def intersection(self, depth: int) -> Node:
        parts = [self.concatenation(depth)]
        while self.take("&"):
            parts.append(self.concatenation(depth))
        return parts[0] if len(parts) == 1 else Intersection(tuple(parts))

    def concatenation(self, depth: int) -> Node:
        parts = []
        while self.peek() not in ("", "|", "&", ")"):
            parts.append(self.repetition(depth))
        if not parts:
            raise self.fail("nothing where an expression is needed")
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def repetition(self, depth: int) -> Node:
        complements = 0
        while self.take("~"):
            complements += 1
        node = self.atom(depth)
        if complements % 2:
            node = Complement(node)
        operators = 0
        while (operator := self.peek()) and operator in "*+?{":
            operators += 1
            if operators > DEEPEST:
                raise self.fail(f"more than {DEEPEST} repetitions of repetitions")
            node = Repetition(node, *(self.bounds() if operator == "{" else _REPEATS[operator]))
            if operator != "{":
                self.position += 1
        return node

    def bounds(self) -> tuple[int, int | None]:
        closing = self.text.find("}", self.position)
        least, comma, most = self.text[self.position + 1 : max(closing, 0)].partition(",")
        if closing < 0 or not _is_number(least) or not (most == "" or (comma and _is_number(most))):
            raise self.fail("'{' without {n}, {n,} or {n,m}")
        lowest, highest = int(least), int(most) if most else None if comma else int(least)
        if highest is not None and highest < lowest:
            raise self.fail(f"bounds in the wrong order, {lowest} to {highest}")
        self.position = closing + 1
        return lowest, highest

    def atom(self, depth: int) -> Node:
        character = self.peek()
        if self.take("("):
            return self.bracket(depth)
        if self.take("["):
            return self.character_class()
        if self.take("."):
            return ANY
        if character == "\\":
            return self.backslash()
        if character in _RESERVED or not character:
            raise self.fail(f"'{character}' where a character is needed" if character else "nothing after '~'")
        self.position += 1
        return _characters(((ord(character), ord(character)),))

    def bracket(self, depth: int) -> Node:
        if self.take(")"):
            return Concatenation(())
        node = self.union(depth + 1)
        if not self.take(")"):
            raise self.fail("no ')'")
        return node

    def backslash(self) -> Node:
        if self.text.startswith("\\b", self.position):
            self.position += 2
            return Boundary()
        return _characters(self.escape())

    def escape(self) -> Ranges:
        self.position += 1
        character = self.peek()
        if character in _CLASSES:
            found = _CLASSES[character]
        elif character in _CONTROLS:
            found = _of(_CONTROLS[character])
        elif character and not (character.isalnum() or character == "_"):
            found = _of(character)
        else:
            raise self.fail(f"'\\{character}', which means nothing,")
        self.position += 1
        return found

    def character_class(self) -> Node:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            first = self.class_member()
            if self.peek() == "-" and self.text[self.position + 1 : self.position + 2] != "]":
                self.position += 1
                last = self.class_member()
                if any(len(end) != 1 or end[0][0] != end[0][1] for end in (first, last)):
                    raise self.fail("a range that ends in a class of characters")
                if last[0][0] < first[0][0]:
                    raise self.fail(f"a range in the wrong order, {chr(first[0][0])} to {chr(last[0][0])},")
                ranges.append((first[0][0], last[0][0]))
            else:
                ranges.extend(first)
        if not ranges:
            raise self.fail("'[]' without characters")
        apart = _sorted_apart(ranges)
        return _characters(_others(apart) if negated else apart)

    def class_member(self) -> Ranges:
        character = self.peek()
        if character == "":
            raise self.fail("no ']'")
        if character == "\\":
            return self.escape()
        self.position += 1
        return ((ord(character), ord(character)),)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _characters(ranges: Ranges) -> Characters:
    """A set of characters, the newline taken out."""
    inside = (
        piece
        for first, last in ranges
        for piece in ((first, min(last, _NEWLINE - 1)), (max(first, _NEWLINE + 1), last))
        if piece[0] <= piece[1]
    )
    return Characters(tuple(inside))
