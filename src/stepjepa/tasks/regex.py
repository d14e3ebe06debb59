r"""Decide whether two regular expressions of NL-RX match the same lines, and match lines against one.

Equivalence is decided exactly, by Brzozowski derivatives: both expressions are followed through all lines at once, and
they are equivalent if no line leads to a pair of derivatives of which only one accepts the end. There may be billions
of such pairs, so untrusted expressions need a limit of time. What ``\b`` matches depends on the characters before and
behind. Therefore a derivative is taken after a given kind of character, and a term records for each of the four
surroundings (word character before or not, behind or not) whether it accepts the empty text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce
from operator import and_, or_

from stepjepa.tasks.regex_syntax import Bounds, Kind, Node, parse

_WORD = Node("characters", text=r"\w")


class TooManyStatesError(Exception):
    """The comparison of two expressions needs more states than allowed."""


def find_difference(left: str, right: str, most_states: int | None = None) -> str | None:
    """Return a shortest line that only one of two expressions matches; None if they are equivalent.

    Args:
        left: an expression.
        right: another one.
        most_states: maximum number of pairs of derivatives to look at; None for no limit.

    Raises:
        RegexSyntaxError: one of them is no expression of the language.
        TooManyStatesError: the limit is reached.
    """
    trees = parse(left), parse(right)
    examples, blocks = _alphabet((left, right), _character_sets(trees[0]) | _character_sets(trees[1]))
    is_word = [int(_WORD.holds(example)) for example in examples]
    terms = _Terms(is_word)
    # Breadth-first search over pairs of derivatives, each with the line that leads there and whether it ends with a
    # word character; beyond the ends of a line there is none.
    waiting = deque([(terms.of(trees[0], blocks), terms.of(trees[1], blocks), 0, "")])
    visited = set[tuple[object, object, int]]()
    while waiting:
        first, second, before, line = waiting.popleft()
        if (first.accepts ^ second.accepts) >> (2 * before) & 1:
            return line
        for block, example in enumerate(examples):
            pair = terms.derivative(first, before, block), terms.derivative(second, before, block)
            state = *pair, is_word[block]
            if pair[0] is not pair[1] and state not in visited:
                if most_states is not None and len(visited) >= most_states:
                    raise TooManyStatesError
                visited.add(state)
                waiting.append((*pair, is_word[block], line + example))
    return None


class Matcher:
    """Matches lines against one expression, which is parsed once.

    Raises:
        RegexSyntaxError: it is no expression.
    """

    def __init__(self, expression: str) -> None:
        tree = parse(expression)
        examples, self._blocks = _alphabet((expression,), _character_sets(tree))
        self._is_word = [int(_WORD.holds(example)) for example in examples]
        self._terms = _Terms(self._is_word)
        self._term = self._terms.of(tree, self._blocks)
        self._block_of = cache(self._find_block)

    def __call__(self, line: str) -> bool:
        """Return whether the expression matches the whole line."""
        term, before = self._term, 0
        for character in line:
            block = self._block_of(character)
            term, before = self._terms.derivative(term, before, block), self._is_word[block]
        return bool(term.accepts >> (2 * before) & 1)

    def _find_block(self, character: str) -> int:
        held = [(bits, members.holds(character)) for members, bits in self._blocks.items()]
        return next(n for n in range(len(self._is_word)) if all(bits >> n & 1 == inside for bits, inside in held))


def _character_sets(node: Node) -> set[Node]:
    nodes = {"characters": {node}, "boundary": {_WORD}}.get(node.kind, set())
    return nodes.union(*map(_character_sets, node.parts))


def _alphabet(texts: Iterable[str], character_sets: set[Node]) -> tuple[list[str], dict[Node, int]]:
    """Return one example of each block of characters that no set distinguishes, and the blocks of each set as bits."""
    # The first character of every set, and the one after its last, is in ASCII, in the texts, or follows one of these.
    sets = sorted(character_sets)
    codes = {*range(129), *(ord(character) + more for text in texts for character in text for more in (0, 1))}
    examples: dict[tuple[bool, ...], str] = {}
    # A later example replaces an earlier one: the most readable last. A newline is in no line.
    for code in (*sorted(codes - {10, 0x110000}, reverse=True), *map(ord, reversed("aA0-bB1 _eE.+"))):
        examples[tuple(members.holds(chr(code)) for members in sets)] = chr(code)
    blocks = {
        members: sum(1 << block for block, inside in enumerate(examples) if inside[number])
        for number, members in enumerate(sets)
    }
    return list(examples.values()), blocks


# The surroundings of a place as a number: 2 * before + behind, each 1 next to a word character. A set of them as bits:
_EVERYWHERE = 0b1111
_AT_BOUNDARIES = 0b0110


@dataclass(eq=False, slots=True)
class _Term:
    """An expression over blocks of characters; equal terms are one object, numbered in order of creation.

    ``blocks`` are its characters, ``accepts`` the surroundings in which it matches the empty text, both as bits.
    """

    kind: Kind
    parts: tuple[_Term, ...]
    bounds: Bounds
    blocks: int
    accepts: int
    number: int


class _Terms:
    """Makes simplified terms, so that derivatives repeat soon; ``is_word`` is 0 or 1 for each block."""

    def __init__(self, is_word: list[int]) -> None:
        self._is_word = is_word
        self.derivative = cache(self._derive)
        self._made: dict[tuple[object, ...], _Term] = {}
        self.none = self._make("none", 0)
        self.empty = self._make("empty", _EVERYWHERE)
        self.all = self._make("repetition", _EVERYWHERE, (self._characters((1 << len(is_word)) - 1),), (0, None))

    def _make(
        self, kind: Kind, accepts: int, parts: tuple[_Term, ...] = (), bounds: Bounds = (1, 1), blocks: int = 0
    ) -> _Term:
        key = (kind, parts, bounds, blocks)
        if key not in self._made:
            self._made[key] = _Term(kind, parts, bounds, blocks, accepts, len(self._made))
        return self._made[key]

    def of(self, node: Node, blocks: dict[Node, int]) -> _Term:
        """Make the term of a tree; ``blocks`` maps each set of characters to its blocks as bits."""
        parts = [self.of(part, blocks) for part in node.parts]
        match node.kind:
            case "characters":
                return self._characters(blocks[node])
            case "boundary":
                return self._make("boundary", _AT_BOUNDARIES)
            case "complement":
                return self._complement(*parts)
            case "repetition":
                return self._repetition(parts[0], *node.bounds)
            case "concatenation":
                return self._concatenation(parts)
        return self._combined(node.kind, parts)

    def _characters(self, blocks: int) -> _Term:
        return self._make("characters", 0, blocks=blocks) if blocks else self.none

    def _concatenation(self, parts: Iterable[_Term]) -> _Term:
        flat: list[_Term] = []
        for part in parts:
            if part is self.none:
                return self.none
            for piece in part.parts if part.kind == "concatenation" else (part,):
                if piece is self.empty:
                    continue
                # A part that matches the empty text is redundant next to one that matches everything.
                while flat and piece is self.all and flat[-1].accepts == _EVERYWHERE:
                    flat.pop()
                if not (flat and flat[-1] is self.all and piece.accepts == _EVERYWHERE):
                    flat.append(piece)
        if len(flat) < 2:
            return flat[0] if flat else self.empty
        return self._make("concatenation", reduce(and_, (piece.accepts for piece in flat)), tuple(flat))

    def _repetition(self, inner: _Term, least: int, most: int | None) -> _Term:
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
        return self._make("repetition", inner.accepts if least else _EVERYWHERE, (inner,), (least, most))

    def _complement(self, inner: _Term) -> _Term:
        if inner.kind == "complement":
            return inner.parts[0]
        if inner in (self.none, self.all):
            return self.all if inner is self.none else self.none
        return self._make("complement", ~inner.accepts & _EVERYWHERE, (inner,))

    def _combined(self, kind: Kind, parts: Iterable[_Term]) -> _Term:
        """Make a union or intersection of the distinct parts, with their character sets merged."""
        neutral, dominant, operator = (self.none, self.all, or_) if kind == "union" else (self.all, self.none, and_)
        members = {member for part in parts for member in (part.parts if part.kind == kind else (part,))} - {neutral}
        characters = {member for member in members if member.kind == "characters"}
        if characters:
            members = members - characters | {
                self._characters(reduce(operator, (member.blocks for member in characters)))
            }
        if dominant in members:
            return dominant
        if len(members) < 2:
            return members.pop() if members else neutral
        in_order = tuple(sorted(members, key=lambda member: member.number))
        return self._make(kind, reduce(operator, (member.accepts for member in members)), in_order)

    def _derive(self, term: _Term, before: int, block: int) -> _Term:
        """Return the derivative of a term by a character of a block; ``before`` is 1 after a word character."""
        surroundings = 2 * before + self._is_word[block]
        match term.kind:
            case "characters":
                return self.empty if term.blocks >> block & 1 else self.none
            case "complement":
                return self._complement(self.derivative(term.parts[0], before, block))
            case "union" | "intersection":
                return self._combined(term.kind, [self.derivative(part, before, block) for part in term.parts])
            case "concatenation":
                choices: list[_Term] = []
                for position, part in enumerate(term.parts):
                    choices += self._followed(self.derivative(part, before, block), term.parts[position + 1 :])
                    if not part.accepts >> surroundings & 1:
                        break
                return self._combined("union", choices)
            case "repetition":
                (inner,), (least, most) = term.parts, term.bounds
                # If the inner term accepts the empty text here, any number of turns may precede the character.
                least = 0 if inner.accepts >> surroundings & 1 else max(least - 1, 0)
                turns = self._repetition(inner, least, None if most is None else most - 1)
                return self._combined("union", self._followed(self.derivative(inner, before, block), (turns,)))
        return self.none  # no empty text begins with a character

    def _followed(self, first: _Term, rest: tuple[_Term, ...]) -> list[_Term]:
        """Return each choice of ``first``, followed by ``rest``; written out, so that equal terms are recognised."""
        choices = first.parts if first.kind == "union" else (first,)
        return [self._concatenation((choice, *rest)) for choice in choices]
