r"""Do two regular expressions of NL-RX describe the same lines?

Decided exactly, by Brzozowski derivatives: both expressions are followed through all lines at once, and they are
equivalent if no line leads to a pair of derivatives of which one accepts the end and the other does not. Most questions
take milliseconds. Expressions can be written with billions of such pairs, so untrusted ones need a limit of time.

The derivative of an expression by a character describes what may come after that character. ``\b`` takes no characters,
so what it describes depends on what stands before and behind. Therefore a derivative is taken after a given kind of
character, and whether a term accepts the empty text is known for each of the four surroundings (word character before
or not, behind or not). That is all that ``\b`` needs, also under ``&``, ``~`` and repetition.

A line is a text of any characters but the newline; the expression must describe the whole of it. Word characters are
the ASCII letters and digits and ``_``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_
from typing import Literal

from stepjepa.tasks.regex_syntax import (
    ANY,
    WORD,
    Boundary,
    Characters,
    Complement,
    Concatenation,
    Intersection,
    Node,
    Ranges,
    Repetition,
    Union,
    parse,
)

# Tried in turn as the example of a block of characters.
_READABLE = "aA0-bB1 _eE.+"

# The surroundings of a place as a number: 2 * before + behind, each 1 next to a word character. A set of them as bits:
_EVERYWHERE = 0b1111
_AT_BOUNDARIES = 0b0110

Kind = Literal[
    "none", "empty", "characters", "boundary", "concatenation", "union", "intersection", "complement", "repetition"
]


def equivalent(left: str, right: str) -> bool:
    """Whether two expressions describe the same lines; raises as :func:`find_difference`."""
    return find_difference(left, right) is None


def find_difference(left: str, right: str) -> str | None:
    """A shortest line that one of two expressions describes and the other does not; None if they are equivalent.

    Raises:
        RegexSyntaxError: one of them is no expression.
    """
    trees = parse(left), parse(right)
    examples, blocks = _alphabet(_character_sets(trees[0]) | _character_sets(trees[1]))
    is_word = [int(_holds(WORD, ord(example))) for example in examples]
    terms = _Terms(is_word)
    # Breadth-first search over pairs of derivatives, each with the line that leads there and whether it ends with a
    # word character; beyond the ends of a line there is none.
    waiting = deque([(terms.of(trees[0], blocks), terms.of(trees[1], blocks), 0, "")])
    seen = set()
    while waiting:
        first, second, before, line = waiting.popleft()
        if (first.accepts ^ second.accepts) >> (2 * before) & 1:
            return line
        for block, example in enumerate(examples):
            pair = terms.derivative(first, before, block), terms.derivative(second, before, block)
            state = *pair, is_word[block]
            if pair[0] is not pair[1] and state not in seen:
                seen.add(state)
                waiting.append((*pair, is_word[block], line + example))
    return None


def _character_sets(node: Node) -> set[Ranges]:
    match node:
        case Characters(ranges):
            return {ranges}
        case Boundary():
            return {WORD}
        case Complement(inner) | Repetition(inner):
            return _character_sets(inner)
        case _:
            return set().union(*map(_character_sets, node.parts))


def _holds(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _alphabet(character_sets: set[Ranges]) -> tuple[list[str], dict[Ranges, int]]:
    """The characters of lines in blocks that two expressions do not tell apart.

    Returns:
        An example of each block, and the blocks of each set of characters as bits.
    """
    sets = [ANY.ranges, *sorted(character_sets - {ANY.ranges})]
    # Between two neighbouring cuts all characters are in the same sets.
    cuts = sorted({cut for ranges in sets for first, last in ranges for cut in (first, last + 1)})
    examples: dict[tuple[bool, ...], int] = {}
    # A later example replaces an earlier one: the most readable last.
    for code in (*reversed(cuts), *map(ord, reversed(_READABLE))):
        inside = tuple(_holds(ranges, code) for ranges in sets)
        # A newline is in no line.
        if inside[0]:
            examples[inside] = code
    blocks = {
        ranges: sum(1 << block for block, inside in enumerate(examples) if inside[number])
        for number, ranges in enumerate(sets)
    }
    return [chr(code) for code in examples.values()], blocks


@dataclass(eq=False, slots=True)
class _Term:
    """An expression over blocks of characters; equal ones are one object.

    Attributes:
        kind: ``none`` describes no text at all, ``empty`` the empty text.
        parts: the terms it is made of.
        bounds: of a repetition, None for no upper one.
        blocks: of characters, as bits.
        accepts: in which surroundings it describes the empty text, as bits.
        number: in the order of making.
        derivatives: those known.
    """

    kind: Kind
    parts: tuple[_Term, ...]
    bounds: tuple[int, int | None]
    blocks: int
    accepts: int
    number: int
    derivatives: dict[int, _Term] = field(default_factory=dict)


class _Terms:
    """Makes terms, in a form simple enough that following derivatives comes back to known ones soon.

    Args:
        is_word: for each block of characters 1 if they are word characters, else 0.
    """

    def __init__(self, is_word: list[int]) -> None:
        self._is_word = is_word
        self._made: dict[tuple[object, ...], _Term] = {}
        self.none = self._make("none", 0)
        self.empty = self._make("empty", _EVERYWHERE)
        self.all = self._make("repetition", _EVERYWHERE, (self.characters((1 << len(is_word)) - 1),), bounds=(0, None))

    def _make(
        self,
        kind: Kind,
        accepts: int,
        parts: tuple[_Term, ...] = (),
        *,
        bounds: tuple[int, int | None] = (1, 1),
        blocks: int = 0,
    ) -> _Term:
        key = (kind, parts, bounds, blocks)
        if key not in self._made:
            self._made[key] = _Term(kind, parts, bounds, blocks, accepts, len(self._made))
        return self._made[key]

    def of(self, node: Node, blocks: dict[Ranges, int]) -> _Term:
        """The term of a tree."""
        match node:
            case Characters(ranges):
                return self.characters(blocks[ranges])
            case Boundary():
                return self._make("boundary", _AT_BOUNDARIES)
            case Complement(inner):
                return self.complement(self.of(inner, blocks))
            case Repetition(inner, least, most):
                return self.repetition(self.of(inner, blocks), least, most)
        joined = {Concatenation: self.concatenation, Union: self.union, Intersection: self.intersection}
        return joined[type(node)]([self.of(part, blocks) for part in node.parts])

    def characters(self, blocks: int) -> _Term:
        """One character out of the blocks that are set as bits."""
        return self._make("characters", 0, blocks=blocks) if blocks else self.none

    def concatenation(self, parts: Iterable[_Term]) -> _Term:
        """One term after the other."""
        flat: list[_Term] = []
        for part in parts:
            if part is self.none:
                return self.none
            for piece in part.parts if part.kind == "concatenation" else (part,):
                if piece is self.empty:
                    continue
                # What may be nothing adds nothing next to what may be anything.
                while flat and piece is self.all and flat[-1].accepts == _EVERYWHERE:
                    flat.pop()
                if not (flat and flat[-1] is self.all and piece.accepts == _EVERYWHERE):
                    flat.append(piece)
        if len(flat) < 2:
            return flat[0] if flat else self.empty
        return self._make("concatenation", reduce(and_, (piece.accepts for piece in flat)), tuple(flat))

    def repetition(self, inner: _Term, least: int, most: int | None) -> _Term:
        """A term several times."""
        if (least, most) == (1, 1):
            return inner
        if most == 0 or inner is self.empty:
            return self.empty
        if inner is self.none:
            return self.none if least else self.empty
        if inner.kind == "repetition" and inner.bounds == (0, None):
            return inner
        if inner.accepts == _EVERYWHERE:
            least = 0
        accepts = inner.accepts if least else _EVERYWHERE
        return self._make("repetition", accepts, (inner,), bounds=(least, most))

    def complement(self, inner: _Term) -> _Term:
        """What a term does not describe."""
        if inner.kind == "complement":
            return inner.parts[0]
        if inner is self.none:
            return self.all
        if inner is self.all:
            return self.none
        return self._make("complement", ~inner.accepts & _EVERYWHERE, (inner,))

    def union(self, parts: Iterable[_Term]) -> _Term:
        """What one of the terms describes."""
        return self._combined("union", parts, self.none, self.all, or_)

    def intersection(self, parts: Iterable[_Term]) -> _Term:
        """What all terms describe."""
        return self._combined("intersection", parts, self.all, self.none, and_)

    def _combined(
        self, kind: Kind, parts: Iterable[_Term], neutral: _Term, dominant: _Term, operator: Callable[[int, int], int]
    ) -> _Term:
        """The different parts, with their sets of characters made one; ``dominant`` alone where it is one of them."""
        members = {member for part in parts for member in (part.parts if part.kind == kind else (part,))} - {neutral}
        characters = {member for member in members if member.kind == "characters"}
        if characters:
            members = members - characters | {self.characters(reduce(operator, (each.blocks for each in characters)))}
        if dominant in members:
            return dominant
        if len(members) < 2:
            return members.pop() if members else neutral
        in_order = tuple(sorted(members, key=lambda member: member.number))
        return self._make(kind, reduce(operator, (member.accepts for member in members)), in_order)

    def derivative(self, term: _Term, before: int, block: int) -> _Term:
        """What may follow a character of a block that a term begins with; ``before`` is 1 behind a word character."""
        key = 2 * block + before
        found = term.derivatives.get(key)
        if found is None:
            found = term.derivatives[key] = self._derive(term, before, block)
        return found

    def _derive(self, term: _Term, before: int, block: int) -> _Term:
        surroundings = 2 * before + self._is_word[block]
        after = self.none  # no empty text begins with a character
        match term.kind:
            case "characters":
                after = self.empty if term.blocks >> block & 1 else self.none
            case "complement":
                after = self.complement(self.derivative(term.parts[0], before, block))
            case "union":
                after = self.union([self.derivative(part, before, block) for part in term.parts])
            case "intersection":
                after = self.intersection([self.derivative(part, before, block) for part in term.parts])
            case "concatenation":
                choices: list[_Term] = []
                for position, part in enumerate(term.parts):
                    choices += self._before(self.derivative(part, before, block), term.parts[position + 1 :])
                    if not part.accepts >> surroundings & 1:
                        break
                after = self.union(choices)
            case "repetition":
                (inner,), (least, most) = term.parts, term.bounds
                # Where the inner term accepts nothing, any number of turns may be spent before the character.
                least = 0 if inner.accepts >> surroundings & 1 else max(least - 1, 0)
                turns = self.repetition(inner, least, None if most is None else most - 1)
                after = self.union(self._before(self.derivative(inner, before, block), (turns,)))
        return after

    def _before(self, first: _Term, rest: tuple[_Term, ...]) -> list[_Term]:
        """The choices of ``first``, then ``rest``: written out, so that equal ones from several sources are found."""
        choices = first.parts if first.kind == "union" else (first,)
        return [self.concatenation((choice, *rest)) for choice in choices]
