r"""Parse the regular expressions of NL-RX.

They are those of textbooks with two more operators, ``&`` and ``~``, and describe whole lines::

    union         = intersection ('|' intersection)*
    intersection  = concatenation ('&' concatenation)*
    concatenation = repetition repetition*
    repetition    = complement ('*' | '+' | '?' | '{n}' | '{n,}' | '{n,m}')*
    complement    = '~' complement | atom
    atom          = '(' union ')' | '()' | '[' class ']' | '.' | '\b' | escape | character

``^`` and ``$`` are characters only behind a backslash. Classes and escapes are Python's: ``\d``, ``\w``, ``\s``, their
capitals (of ASCII), ``\t`` and the like.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

# The published expressions have 54 characters at most, nested 6 deep.
LONGEST = 1000

# Minimum and maximum number of repetitions; None for no upper bound.
Bounds: TypeAlias = tuple[int, int | None]
Kind = Literal[
    "none", "empty", "characters", "boundary", "concatenation", "union", "intersection", "complement", "repetition"
]


class RegexSyntaxError(ValueError):
    """Syntax error in an expression of the dialect; the message names the position and the reason."""


class Node(NamedTuple):
    """A part of an expression: ``characters`` have a text, a ``repetition`` bounds; no parts to join are empty text."""

    kind: Kind
    parts: tuple[Node, ...] = ()
    text: str = ""  # one character, an escape or a class, in the syntax of Python's ``re``
    bounds: Bounds = (1, 1)

    def holds(self, character: str) -> bool:
        """Return whether a character is in this set."""
        return _compiled(self.text).fullmatch(character) is not None


@cache
def _compiled(text: str) -> re.Pattern[str]:
    # Python warns of classes whose meaning may change in a future version, such as [a&&b].
    with warnings.catch_warnings(action="ignore"):
        return re.compile(text, re.ASCII)


_REPEATS: dict[str, Bounds] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPE = r"\\(?:[dwsDWStnrfv]|[^\w])"
_TOKEN = re.compile(
    r"(?P<repeat>[*+?])|\{(?P<least>[0-9]+)(?P<comma>,(?P<most>[0-9]+)?)?\}|(?P<boundary>\\b)"
    rf"|(?P<characters>\[\^?(?:{_ESCAPE}|[^\]\\])+\]|{_ESCAPE}|[^|&~()*+?{{}}\[\]\\^$])"
)


def parse(text: str) -> Node:
    """Parse an expression; raise :class:`RegexSyntaxError` if it is malformed, too long or nested too deeply."""
    if len(text) > LONGEST:
        raise RegexSyntaxError(f"expected at most {LONGEST} characters, got {len(text)}")
    if "\n" in text:
        raise RegexSyntaxError("expected one line, got several")
    parser = _Parser(text)
    try:
        node = parser.union()
    except RecursionError:
        raise RegexSyntaxError("brackets nested too deeply") from None
    if parser.position < len(text):
        raise parser.error("a ')' that closes nothing")
    return node


class _Parser:
    """Reads an expression from left to right, one method per rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def error(self, fault: str) -> RegexSyntaxError:
        return RegexSyntaxError(f"{fault} at character {self.position + 1}")

    def take(self, expected: str) -> bool:
        """Consume the next character if it is ``expected``; return whether it was."""
        matches = self.text.startswith(expected, self.position)
        self.position += matches
        return matches

    def union(self) -> Node:
        return self.joined("union", "|", lambda: self.joined("intersection", "&", self.concatenation))

    def joined(self, kind: Kind, operator: str, part: Callable[[], Node]) -> Node:
        parts = [part()]
        while self.take(operator):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))

    def concatenation(self) -> Node:
        parts = [self.repetition()]
        while self.position < len(self.text) and self.text[self.position] not in "|&)":
            parts.append(self.repetition())
        return parts[0] if len(parts) == 1 else Node("concatenation", tuple(parts))

    def repetition(self) -> Node:
        negated = False
        while self.take("~"):
            negated = not negated
        node = Node("complement", (self.atom(),)) if negated else self.atom()
        while (token := _TOKEN.match(self.text, self.position)) and (token["repeat"] or token["least"]):
            least, most = _REPEATS.get(token["repeat"]) or (int(token["least"]), None)
            if token["least"] and (token["most"] or not token["comma"]):
                most = int(token["most"] or least)
            if most is not None and most < least:
                raise self.error(f"bounds in the wrong order, {least} to {most}")
            node = Node("repetition", (node,), bounds=(least, most))
            self.position = token.end()
        return node

    def atom(self) -> Node:
        if self.take("("):
            if self.take(")"):
                return Node("concatenation")
            node = self.union()
            if not self.take(")"):
                raise self.error("no ')'")
            return node
        token = _TOKEN.match(self.text, self.position)
        if token is None or not (token["boundary"] or token["characters"]):
            raise self.error(f"'{self.text[self.position : self.position + 1]}' where a character is needed")
        node = Node("boundary") if token["boundary"] else Node("characters", text=token[0])
        try:
            _compiled(node.text)
        except re.error as error:
            raise self.error(f"'{token[0]}' ({error.msg})") from None
        self.position = token.end()
        return node
