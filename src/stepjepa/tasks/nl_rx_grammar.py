r"""Descriptions of lines and the regular expressions that go with them, from the grammar of NL-RX-Synth.

A description is a tree of productions under the word "lines"; each has a wording and an expression, into which those
of its parts are put. The productions are in ``nl_rx_grammar.yaml``. Trees are drawn as for the published set (Locascio
et al., 2016), so many of them that the frequent ones come up again and again and only the rare ones are still new; each
description counts once. Phrases, productions and depths are as frequent as in the published set.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import islice
from typing import NamedTuple

import yaml

_GRAMMAR = yaml.safe_load(resources.files("stepjepa.tasks").joinpath("nl_rx_grammar.yaml").read_text("utf-8"))

# What the strings of a description are, in their order.
STRINGS = ("dog", "truck", "ring", "lake")
_STRING = "WORD"


class Production(NamedTuple):
    """One way to make a description out of others, see ``nl_rx_grammar.yaml``."""

    wording: str
    regex: str
    parts: Sequence[str] = ()
    negated: str | None = None


PRODUCTIONS = {name: Production(**fields) for name, fields in _GRAMMAR["productions"].items()}
_LITERALS, _FUNCTIONS, _REPETITIONS, _COMPOSITIONS = (
    _GRAMMAR[name] for name in ("literals", "functions", "repetitions", "compositions")
)
_MODIFIERS = [*_REPETITIONS, "containing only"]
_TRIPLES = {"and, and", "either, or"}
# What a part is drawn from; every literal is in all of the groups that have any.
GROUPS = {
    "any": _FUNCTIONS + _COMPOSITIONS + _MODIFIERS + _LITERALS,
    "no literal": _FUNCTIONS + _COMPOSITIONS + _MODIFIERS,
    "no composition": [*_FUNCTIONS, *_MODIFIERS, *_LITERALS, "or"],
    "literal": _LITERALS,
}


class Tree(NamedTuple):
    """A description: the name of a production, what is put into it, and the number in it, where it has one."""

    name: str
    parts: tuple[Tree, ...] = ()
    times: int | None = None

    def names(self) -> Iterator[str]:
        """Of all productions in the tree."""
        yield self.name
        for part in self.parts:
            yield from part.names()


def describe(tree: Tree) -> str:
    """The description of lines that a tree stands for."""

    def word(tree: Tree, negated: bool) -> str:
        production = PRODUCTIONS[tree.name]
        parts = [word(part, negated or tree.name == "not") for part in tree.parts]
        wording = production.negated if negated and production.negated else production.wording
        return wording.format(*parts, times=tree.times)

    description = f"lines {word(tree, False)}"
    for clumsy, smoother in _GRAMMAR["smoother"]:
        description = description.replace(clumsy, smoother)
    return _name_strings(description)


def express(tree: Tree) -> str:
    """The regular expression that a tree stands for."""

    def expression(tree: Tree) -> str:
        return PRODUCTIONS[tree.name].regex.format(*map(expression, tree.parts), times=tree.times)

    return _name_strings(expression(tree))


def _name_strings(text: str) -> str:
    for string in STRINGS:
        text = text.replace(_STRING, string, 1)
    return text


class _Room(NamedTuple):
    """How large a tree may become below a place; where no room is left, only literals fit.

    Attributes:
        depth: productions one below the other, literals left out.
        size: productions on one way down, each with the number of its parts added.
        compositions: "and" and "or" on one way down.
    """

    depth: int
    size: int
    compositions: int = 2


# So many draws give about 10,000 pairs, as the published set has, and small and large ones in its proportion. Of the
# small ones hardly any is new at the end.
_SMALL, _SMALL_DRAWS = _Room(depth=2, size=5), 600_000
_LARGE, _LARGE_DRAWS = _Room(depth=3, size=7), 60_000

# Draws in a row that bring nothing new before the grammar counts as used up.
_PATIENCE = 50_000


def _draw_parts(groups: Sequence[str], draw: random.Random, room: _Room) -> tuple[Tree, ...] | None:
    """Trees for several parts side by side, each from its group of productions; None where one finds no room."""
    depth, size, compositions = room
    names = []
    for group in groups:
        full = min(depth, size, compositions) <= 0
        candidates = (_LITERALS if group != "no literal" else []) if full else GROUPS[group]
        if not candidates:
            return None
        name = candidates[int(draw.random() * len(candidates))]
        names.append(name)
        size -= 1 + len(PRODUCTIONS[name].parts)
        compositions -= name in ("and", "or")
    trees = []
    for name in names:
        parts = _draw_parts(PRODUCTIONS[name].parts, draw, _Room(depth - 1, size, compositions))
        if parts is None:
            return None
        trees.append(Tree(name, parts, draw.randint(2, 7) if name == "or more times" else None))
    return tuple(trees)


def is_sound(tree: Tree) -> bool:
    """Whether a tree makes a description as the published ones are."""
    counts = Counter(tree.names())
    strings = counts.pop("string", 0)
    if strings > len(STRINGS) or max(counts.values()) > 1 or sum(counts[name] for name in _REPETITIONS) > 1:
        return False
    below = {part.name for part in tree.parts}
    # "lines with a number and a letter": are they the whole line, or in it?
    if tree.name in ("and", "or", *_TRIPLES) and below.intersection(_LITERALS):
        return False
    if "containing only" in below and tree.name != "not":
        return False
    description = describe(tree)
    return not any(phrase in description for phrase in _GRAMMAR["avoided"])


Pair = tuple[str, str]


def _draw_pairs(seed: int) -> Iterator[Pair]:
    """Descriptions and their expressions, no description twice, until the grammar is used up.

    First the 10,000 or so that as many draws bring as for the published set, shuffled, so that few of them are
    distributed like many; after that large ones, which become larger the more of them there are.
    """
    draw = random.Random(f"nl-rx {seed}")
    known: set[Tree] = set()
    pairs: dict[str, str] = {}

    def new_pair(room: _Room) -> Pair | None:
        parts = _draw_parts(("no literal",), draw, room)
        # There are so many sets of three literals that half of them are skipped.
        if parts is None or (_TRIPLES.intersection(parts[0].names()) and draw.random() < 0.5):
            return None
        tree = parts[0]
        if tree in known:
            return None
        known.add(tree)
        if not is_sound(tree) or (description := describe(tree)) in pairs:
            return None
        pairs[description] = express(tree)
        return description, pairs[description]

    for room, draws in ((_SMALL, _SMALL_DRAWS), (_LARGE, _LARGE_DRAWS)):
        for _ in range(draws):
            new_pair(room)
    first = list(pairs.items())
    draw.shuffle(first)
    yield from first
    failures = 0
    while failures < _PATIENCE:
        pair = new_pair(_LARGE)
        failures = failures + 1 if pair is None else 0
        if pair is not None:
            yield pair


def generate_split(size: int, test_size: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs of a description and its regular expression to train on, and others to test with.

    No description occurs twice, and no expression of a test pair in a training pair. The same seed gives the same
    pairs, a smaller size the first of them, and the test pairs do not depend on the size of the training set.

    Raises:
        ValueError: a size is larger than the number of descriptions in the grammar.
    """
    pairs = _draw_pairs(seed)

    def take(number: int, name: str, avoid: set[str]) -> list[Pair]:
        taken = list(islice((pair for pair in pairs if pair[1] not in avoid), number))
        if len(taken) < number:
            told = f"{name}: expected a size that the grammar has pairs for, got {number} and found {len(taken)}"
            raise ValueError(told)
        return taken

    test = take(test_size, "test_size", set())
    return take(size, "size", {regex for _, regex in test}), test
