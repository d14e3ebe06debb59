"""Generate pairs of a description and a regular expression, as in the data set NL-RX-Synth (Locascio et al., 2016).

A description is a tree of productions (``nl_rx_grammar.yaml``) under the word "lines". Trees are drawn as for the
published set: so often that frequent trees repeat, and only rare ones are still new. Phrases, productions and depths
are as frequent as in that set.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import islice
from typing import NamedTuple

import yaml

from stepjepa.base.errors import UserError

_GRAMMAR = yaml.safe_load(resources.files("stepjepa.tasks").joinpath("nl_rx_grammar.yaml").read_text("utf-8"))
PRODUCTIONS, GROUPS = _GRAMMAR["productions"], _GRAMMAR["groups"]
_LITERALS = GROUPS["literal"]
_TRIPLES = {"and, and", "either, or"}
# The strings of a description, in order.
STRINGS = ("dog", "truck", "ring", "lake")

# Depth and size (see _draw_parts) -> number of draws. They give about 10,000 pairs, as many as the published set has,
# with small and large ones in its proportion; at the end hardly any small one is new.
_LARGE = (3, 7)
_DRAWS = {(2, 5): 600_000, _LARGE: 60_000}
# Draws in a row without a new tree after which the grammar counts as exhausted.
_PATIENCE = 50_000


class Tree(NamedTuple):
    """A description: the name of a production, its parts, and its number of repetitions, if it has one."""

    name: str
    parts: tuple[Tree, ...] = ()
    times: int | None = None

    def names(self) -> Iterator[str]:
        yield self.name
        for part in self.parts:
            yield from part.names()


def _compose(tree: Tree, *, negated: bool = False) -> tuple[str, str]:
    """Return words and regular expression of a tree, with ``WORD`` for each string."""
    production = PRODUCTIONS[tree.name]
    parts = [_compose(part, negated=negated or tree.name == "not") for part in tree.parts]
    wording = production.get("negated" if negated else "wording", production["wording"])
    words, regexes = (part[0] for part in parts), (part[1] for part in parts)
    return wording.format(*words, times=tree.times), production["regex"].format(*regexes, times=tree.times)


def describe(tree: Tree) -> tuple[str, str]:
    """Return the description of a tree in words, and its regular expression."""
    words, regex = _compose(tree)
    description = f"lines {words}"
    for clumsy, smoother in _GRAMMAR["smoother"]:
        description = description.replace(clumsy, smoother)
    for string in STRINGS:
        description, regex = (text.replace("WORD", string, 1) for text in (description, regex))
    return description, regex


def _draw_parts(
    groups: Sequence[str], draw: random.Random, depth: int, size: int, compositions: int = 2
) -> tuple[Tree, ...] | None:
    """Draw a tree for each part from its group of productions; None if one does not fit the limits.

    ``depth`` limits the nesting of productions, without literals; ``size`` the productions and their parts on one path;
    ``compositions`` the "and" and "or" on one path. At a limit only literals fit.
    """
    names = []
    for group in groups:
        full = min(depth, size, compositions) <= 0
        candidates = (_LITERALS if group != "no literal" else []) if full else GROUPS[group]
        if not candidates:
            return None
        name = candidates[int(draw.random() * len(candidates))]
        names.append(name)
        size -= 1 + len(PRODUCTIONS[name].get("parts", ()))
        compositions -= name in ("and", "or")
    trees = []
    for name in names:
        parts = _draw_parts(PRODUCTIONS[name].get("parts", ()), draw, depth - 1, size, compositions)
        if parts is None:
            return None
        trees.append(Tree(name, parts, draw.randint(2, 7) if name == "or more times" else None))
    return tuple(trees)


def is_sound(tree: Tree) -> bool:
    """Return whether the description of a tree is of a kind that occurs in the published set."""
    counts = Counter(tree.names())
    strings = counts.pop("string", 0)
    repetitions = sum(counts[name] for name in _GRAMMAR["repetitions"])
    if strings > len(STRINGS) or max(counts.values()) > 1 or repetitions > 1:
        return False
    below = {part.name for part in tree.parts}
    # "lines with a number and a letter": are they the whole line, or in it?
    if tree.name in ("and", "or", *_TRIPLES) and below.intersection(_LITERALS):
        return False
    if "containing only" in below and tree.name != "not":
        return False
    description, _ = describe(tree)
    return not any(phrase in description for phrase in _GRAMMAR["avoided"])


def _draw_pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Yield unique descriptions and their expressions until the grammar is exhausted.

    The first 10,000 or so come from as many draws as for the published set, shuffled, so that the first N have the same
    distribution for any N; then come large ones, which grow with their number.
    """
    draw = random.Random(f"nl-rx {seed}")
    drawn: set[Tree] = set()
    pairs: dict[str, str] = {}

    def draw_pair(depth: int, size: int) -> bool:
        parts = _draw_parts(("no literal",), draw, depth, size)
        # Half of the sets of three literals are skipped: they are too frequent.
        if parts is None or (_TRIPLES.intersection(parts[0].names()) and draw.random() < 0.5) or parts[0] in drawn:
            return False
        drawn.update(parts)
        pair = describe(parts[0])
        if pair[0] in pairs or not is_sound(parts[0]):
            return False
        pairs.update([pair])
        return True

    for room, draws in _DRAWS.items():
        for _ in range(draws):
            draw_pair(*room)
    first = list(pairs.items())
    draw.shuffle(first)
    yield from first
    while any(draw_pair(*_LARGE) for _ in range(_PATIENCE)):
        yield next(reversed(pairs.items()))


def generate_split(size: int, test_size: int, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return training and test pairs of a description and its regular expression, without duplicates.

    No expression of a test pair is one of a training pair. A larger set begins with the pairs of a smaller one, and the
    test pairs do not depend on the size of the training set. UserError if the grammar has fewer pairs.

    Args:
        size: number of training pairs.
        test_size: number of test pairs.
        seed: the same seed gives the same pairs.
    """
    pairs = _draw_pairs(seed)

    def take(number: int, name: str, avoid: set[str]) -> list[tuple[str, str]]:
        chosen = list(islice((pair for pair in pairs if pair[1] not in avoid), number))
        if len(chosen) < number:
            fault = f"{name}: the grammar gives only {len(chosen)} pairs, and {number} were asked for"
            raise UserError(f"{fault}; ask for fewer")
        return chosen

    test = take(test_size, "test_size", set())
    return take(size, "size", {regex for _, regex in test}), test
