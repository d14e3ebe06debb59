r"""Regular expressions as terms over blocks of characters, and their derivatives.

The derivative of an expression by a character describes what may come after that character. ``\b`` takes no
characters, so what it describes depends on what stands before and behind; therefore a derivative is taken after a
given kind of character, and whether a term accepts nothing is known for each of the four surroundings (word character
before or not, behind or not). This is all that ``\b`` needs, also under ``&``, ``~`` and repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_
from typing import Literal

from stepjepa.tasks.regex.syntax import (
    Boundary,
    Characters,
    Complement,
    Concatenation,
    Intersection,
    Node,
    Ranges,
    Repetition,
    Union,
)

# Bit 2 * before + behind, each 1 next to a word character.
_EVERYWHERE = 0b1111
_AT_BOUNDARIES = 0b0110

Kind = Literal[
    "none", "empty", "characters", "boundary", "concatenation", "union", "intersection", "complement", "repetition"
]
Bounds = tuple[int, int | None]


@dataclass(eq=False, slots=True)
class Term:
    """An expression; made by :class:`Terms`, where equal ones are one object.

    Attributes:
        kind: ``none`` describes no text at all, ``empty`` the empty text.
        parts: the terms it is made of.
        bounds: of a repetition, None for no upper one.
        blocks: of characters, as bits.
        accepts: in which surroundings it describes the empty text, as bits.
        number: in the order of making.
        local: whether the surroundings make a difference to it.
        derivatives: those known, see :meth:`Terms.derivative`.
    """

    kind: Kind
    parts: tuple[Term, ...]
    bounds: Bounds
    blocks: int
    accepts: int
    number: int
    local: bool
    derivatives: dict[int, Term] = field(default_factory=dict)


class Terms:
    """Makes terms, in a form simple enough that following derivatives comes back to known ones soon.

    Args:
        is_word: for each block of characters 1 if they are word characters, else 0.

    Attributes:
        none: describes no text.
        empty: describes the empty text.
        all: describes every text.
    """

    def __init__(self, is_word: tuple[int, ...]) -> None:
        self._is_word = is_word
        self._made: dict[tuple[Kind, tuple[Term, ...], Bounds, int], Term] = {}
        self.none = self._make("none", 0)
        self.empty = self._make("empty", _EVERYWHERE)
        self.all = self._make("repetition", _EVERYWHERE, (self.characters((1 << len(is_word)) - 1),), bounds=(0, None))

    def _make(
        self, kind: Kind, accepts: int, parts: tuple[Term, ...] = (), *, bounds: Bounds = (1, 1), blocks: int = 0
    ) -> Term:
        key = (kind, parts, bounds, blocks)
        if key not in self._made:
            local = kind == "boundary" or any(part.local for part in parts)
            self._made[key] = Term(*key, accepts, len(self._made), local)
        return self._made[key]

    def of(self, node: Node, blocks: dict[Ranges, int]) -> Term:
        """The term of a tree; ``blocks`` are those of each set of characters in it, as bits."""
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

    def characters(self, blocks: int) -> Term:
        """One character out of the blocks that are set as bits."""
        return self._make("characters", 0, blocks=blocks) if blocks else self.none

    def concatenation(self, parts: Iterable[Term]) -> Term:
        """One term after the other."""
        flat: list[Term] = []
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

    def repetition(self, inner: Term, least: int, most: int | None) -> Term:
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

    def complement(self, inner: Term) -> Term:
        """What a term does not describe."""
        if inner.kind == "complement":
            return inner.parts[0]
        if inner is self.none:
            return self.all
        if inner is self.all:
            return self.none
        return self._make("complement", ~inner.accepts & _EVERYWHERE, (inner,))

    def union(self, parts: Iterable[Term]) -> Term:
        """What one of the terms describes."""
        return self._combined("union", parts, self.none, self.all, or_)

    def intersection(self, parts: Iterable[Term]) -> Term:
        """What all terms describe."""
        return self._combined("intersection", parts, self.all, self.none, and_)

    def _combined(
        self, kind: Kind, parts: Iterable[Term], neutral: Term, dominant: Term, operator: Callable[[int, int], int]
    ) -> Term:
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

    def derivative(self, term: Term, before: int, block: int) -> Term:
        """What may follow a character of a block that a term begins with; ``before`` is 1 behind a word character."""
        key = 2 * block + before if term.local else 2 * block
        found = term.derivatives.get(key)
        if found is None:
            found = term.derivatives[key] = self._derive(term, before, block)
        return found

    def _derive(self, term: Term, before: int, block: int) -> Term:
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
                choices: list[Term] = []
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

    def _before(self, first: Term, rest: tuple[Term, ...]) -> list[Term]:
        """The choices of ``first``, then ``rest``: written out, so that equal ones from several sources are found."""
        choices = first.parts if first.kind == "union" else (first,)
        return [self.concatenation((choice, *rest)) for choice in choices]
