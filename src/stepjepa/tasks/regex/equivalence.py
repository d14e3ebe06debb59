r"""Do two regular expressions of NL-RX describe the same lines?

Decided exactly, by following both expressions through all lines at once: they are equivalent if no line leads to a pair
of derivatives of which one accepts the end and the other does not. Most questions take milliseconds. Expressions can be
written with billions of such pairs, so untrusted ones need a limit of time.

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
    return _search(terms, alphabet, *(terms.of(tree, alphabet.blocks) for tree in trees))


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
    def holds(ranges: Ranges, code: int) -> bool:
        return any(first <= code <= last for first, last in ranges)

    sets = [ANY.ranges, *sorted(character_sets - {ANY.ranges})]
    # Between two neighbouring cuts all characters are in the same sets.
    cuts = sorted({cut for ranges in sets for first, last in ranges for cut in (first, last + 1)})
    examples: dict[tuple[bool, ...], int] = {}
    # A later example replaces an earlier one: the most readable last.
    for code in (*reversed(cuts), *map(ord, reversed(_READABLE))):
        inside = tuple(holds(ranges, code) for ranges in sets)
        # A newline is in no line.
        if inside[0]:
            examples[inside] = code
    return _Alphabet(
        tuple(map(chr, examples.values())),
        tuple(int(holds(WORD, code)) for code in examples.values()),
        {
            ranges: sum(1 << block for block, inside in enumerate(examples) if inside[number])
            for number, ranges in enumerate(sets)
        },
    )


def _search(terms: Terms, alphabet: _Alphabet, left: Term, right: Term) -> str | None:
    """A shortest line on which two terms differ, by breadth-first search over the pairs of their derivatives."""
    # With each pair the line that leads there, and whether it ends with a word character; its beginning does not.
    waiting = deque([(left, right, 0, "")])
    seen = set()
    while waiting:
        left, right, before, line = waiting.popleft()
        # Behind the end of a line stands no word character either.
        if (left.accepts ^ right.accepts) >> (2 * before) & 1:
            return line
        for block, (example, is_word) in enumerate(zip(alphabet.examples, alphabet.is_word, strict=True)):
            first, second = (terms.derivative(term, before, block) for term in (left, right))
            # The character before decides about what follows only where there is a boundary.
            state = first, second, is_word if first.local or second.local else 0
            if first is not second and state not in seen:
                seen.add(state)
                waiting.append((first, second, is_word, line + example))
    return None
