r"""Do two regular expressions of NL-RX describe the same lines?

Decided exactly, by following both expressions through all lines at once: two expressions are equivalent if no line
leads to a pair of derivatives of which one accepts the end and the other does not. Only the pairs that are reached are
made, and most questions take milliseconds. Expressions can be written for which there are billions of pairs, so
whoever asks about untrusted ones sets a limit of time.

A line is a text of any characters but the newline; the expression must describe the whole of it. Word characters, by
which ``\b`` goes, are the ASCII letters and digits and ``_``.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from stepjepa.tasks.regex.syntax import ANY, WORD, Boundary, Characters, Complement, Node, Ranges, Repetition, parse
from stepjepa.tasks.regex.terms import Term, Terms

# Tried in turn as the example of a block of characters.
_READABLE = "aA0-bB1 _eE.+"


def equivalent(left: str, right: str) -> bool:
    """Whether two expressions describe the same lines.

    Raises:
        RegexSyntaxError: one of them is no expression.
    """
    return find_difference(left, right) is None


def find_difference(left: str, right: str) -> str | None:
    """A shortest line that one of two expressions describes and the other does not; None if they are equivalent.

    Raises:
        RegexSyntaxError: one of them is no expression.
    """
    trees = parse(left), parse(right)
    alphabet = _make_alphabet(_character_sets(trees[0]) | _character_sets(trees[1]))
    terms = Terms(alphabet.is_word)
    return _follow(terms, alphabet, *(terms.of(tree, alphabet.blocks) for tree in trees))


class _Alphabet(NamedTuple):
    r"""The characters of lines, in blocks that two expressions do not tell apart.

    Attributes:
        examples: a character of each block.
        is_word: for each block 1 if it holds word characters, else 0; without meaning where there is no ``\b``.
        blocks: the blocks of each set of characters in the expressions, as bits.
    """

    examples: tuple[str, ...]
    is_word: tuple[int, ...]
    blocks: dict[Ranges, int]


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


def _make_alphabet(character_sets: set[Ranges]) -> _Alphabet:
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
    return _Alphabet(
        tuple(map(chr, examples.values())),
        tuple(int(_holds(WORD, code)) for code in examples.values()),
        {
            ranges: sum(1 << block for block, inside in enumerate(examples) if inside[number])
            for number, ranges in enumerate(sets)
        },
    )


def _holds(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


class _Pair(NamedTuple):
    """Derivatives of both expressions, and the line that leads there.

    Attributes:
        left: of one expression.
        right: of the other.
        before: 1 if the line ends with a word character, else 0, as at the beginning.
        previous: the pair one character earlier; None at the beginning.
        example: the last character of the line.
    """

    left: Term
    right: Term
    before: int = 0
    previous: _Pair | None = None
    example: str = ""


def _follow(terms: Terms, alphabet: _Alphabet, left: Term, right: Term) -> str | None:
    """A shortest line on which two terms differ, after Hopcroft and Karp: states that were taken for equal once are
    not compared again."""
    classes = _Classes()
    pairs = deque([_Pair(left, right)])
    while pairs:
        pair = pairs.popleft()
        # The character before decides about what follows only where there is a boundary.
        if not classes.join(*((term, term.local and pair.before) for term in (pair.left, pair.right))):
            continue
        # The end of a line counts as no word character.
        if (pair.left.accepts ^ pair.right.accepts) >> (2 * pair.before) & 1:
            return _line(pair)
        for block, is_word in enumerate(alphabet.is_word):
            left, right = (terms.derivative(term, pair.before, block) for term in (pair.left, pair.right))
            if left is not right:
                pairs.append(_Pair(left, right, is_word, pair, alphabet.examples[block]))
    return None


def _line(pair: _Pair) -> str:
    characters = []
    while pair.previous is not None:
        characters.append(pair.example)
        pair = pair.previous
    return "".join(reversed(characters))


_State = tuple[Term, int]


class _Classes:
    """States in classes of those taken for equal (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[_State, _State] = {}

    def _root(self, state: _State) -> _State:
        while (parent := self._parents.get(state, state)) != state:
            # Halving the way keeps later searches short.
            self._parents[state] = self._parents.get(parent, parent)
            state = parent
        return state

    def join(self, one: _State, other: _State) -> bool:
        """Put two states into one class; False if they were in one already."""
        root, other_root = self._root(one), self._root(other)
        self._parents[root] = other_root
        return root != other_root
