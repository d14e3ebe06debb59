r"""Do two regular expressions of NL-RX describe the same lines?

Decided exactly, by following both expressions through all lines at once: two expressions are equivalent if no line
leads to a pair of derivatives of which one accepts the end and the other does not. Only the pairs that are reached are
made, and most questions take milliseconds. Expressions can be written for which there are billions of pairs, so
whoever asks about untrusted ones sets a limit of time.

A line is a text of any characters but the newline; the expression must describe the whole of it. Word characters, by
which ``\b`` goes, are the ASCII letters and digits and ``_``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from stepjepa.tasks.regex.syntax import ANY, WORD, Boundary, Characters, Complement, Node, Ranges, Repetition, parse
from stepjepa.tasks.regex.terms import Term, Terms

# Tried in turn as the example of a block of characters.
_READABLE = "aA0-bB1 _eE.+"

# The end of a line counts as no word character, like its beginning.
_EDGE = 0


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
    alphabet = _make_alphabet([leaf for tree in trees for leaf in _leaves(tree)])
    terms = Terms(alphabet.is_word)
    return _follow(terms, alphabet, *(terms.of(tree, alphabet.blocks) for tree in trees))


class _Alphabet(NamedTuple):
    """The characters of lines, in blocks that two expressions do not tell apart.

    Attributes:
        examples: a character of each block.
        is_word: for each block 1 if it holds word characters, else 0; without meaning where there is no ``\b``.
        blocks: the blocks of each set of characters in the expressions, as bits.
    """

    examples: tuple[str, ...]
    is_word: tuple[int, ...]
    blocks: dict[Ranges, int]


def _leaves(node: Node) -> Iterator[Characters | Boundary]:
    match node:
        case Characters() | Boundary():
            yield node
        case Complement() | Repetition():
            yield from _leaves(node.inner)
        case _:
            for part in node.parts:
                yield from _leaves(part)


def _make_alphabet(leaves: list[Characters | Boundary]) -> _Alphabet:
    sets = list(
        dict.fromkeys([ANY.ranges, *(leaf.ranges if isinstance(leaf, Characters) else WORD for leaf in leaves)])
    )
    # Between two neighbouring cuts all characters are in the same sets; which those are is kept as bits.
    cuts = sorted({cut for ranges in sets for first, last in ranges for cut in (first, last + 1)})
    memberships = dict.fromkeys(cuts, 0)
    for number, ranges in enumerate(sets):
        for first, last in ranges:
            for cut in cuts[bisect_left(cuts, first) : bisect_right(cuts, last)]:
                memberships[cut] |= 1 << number
    examples: dict[int, int] = {}
    # A later one replaces an earlier one: the most readable last.
    for code in (*reversed(cuts), *map(ord, reversed(_READABLE))):
        place = bisect_right(cuts, code) - 1
        if place >= 0 and memberships[cuts[place]]:
            examples[memberships[cuts[place]]] = code
    return _Alphabet(
        tuple(map(chr, examples.values())),
        tuple(int(any(first <= code <= last for first, last in WORD)) for code in examples.values()),
        {
            ranges: sum(1 << block for block, bits in enumerate(examples) if bits >> number & 1)
            for number, ranges in enumerate(sets)
        },
    )


class _Pair(NamedTuple):
    """Derivatives of both expressions, and the line that leads there.

    Attributes:
        left: of one expression.
        right: of the other.
        before: 1 if the line ends with a word character, else 0.
        previous: the pair one character earlier; None at the beginning.
        block: of the last character of the line.
    """

    left: Term
    right: Term
    before: int
    previous: _Pair | None = None
    block: int = 0


def _follow(terms: Terms, alphabet: _Alphabet, left: Term, right: Term) -> str | None:
    """A shortest line on which two terms differ, after Hopcroft and Karp: what is taken for equal once is not asked
    again."""
    classes = _Classes()
    pairs = deque([_Pair(left, right, _EDGE)])
    while pairs:
        pair = pairs.popleft()
        if not classes.join(_state(pair.left, pair.before), _state(pair.right, pair.before)):
            continue
        at_the_end = 2 * pair.before + _EDGE
        if (pair.left.accepts ^ pair.right.accepts) >> at_the_end & 1:
            return _line(pair, alphabet)
        for block, is_word in enumerate(alphabet.is_word):
            after = [terms.derivative(term, pair.before, block) for term in (pair.left, pair.right)]
            if after[0] is not after[1]:
                pairs.append(_Pair(after[0], after[1], is_word, pair, block))
    return None


def _state(term: Term, before: int) -> tuple[Term, int]:
    """What decides about all that follows."""
    return term, before if term.local else 0


def _line(pair: _Pair, alphabet: _Alphabet) -> str:
    characters = []
    while pair.previous is not None:
        characters.append(alphabet.examples[pair.block])
        pair = pair.previous
    return "".join(reversed(characters))


class _Classes:
    """States in classes of those taken for equal."""

    def __init__(self) -> None:
        self._parents: dict[tuple[Term, int], tuple[Term, int]] = {}

    def _root(self, state: tuple[Term, int]) -> tuple[Term, int]:
        while (parent := self._parents.get(state, state)) != state:
            # Halving the way keeps later searches short.
            self._parents[state] = self._parents.get(parent, parent)
            state = parent
        return state

    def join(self, one: tuple[Term, int], other: tuple[Term, int]) -> bool:
        """Put two states into one class; False if they were in one already."""
        root, other_root = self._root(one), self._root(other)
        if root == other_root:
            return False
        self._parents[root] = other_root
        return True
