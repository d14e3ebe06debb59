"""From a regular expression of NL-RX-Synth back to the trees of the grammar that it may come from."""

from functools import cache

from stepjepa.tasks.nl_rx_grammar import GROUPS, PRODUCTIONS, STRINGS, Tree, describe


def find_trees(description, regex):
    """All trees that make this pair, whatever their size."""
    anonymous = regex
    for string in STRINGS:
        anonymous = anonymous.replace(string, "WORD")
    return [tree for tree in _trees(anonymous, "no literal") if describe(tree) == (description, regex)]


@cache
def _trees(regex, group):
    """The trees with this expression, the strings in it not told apart, whose root is of a group."""
    return [tree for name in dict.fromkeys(GROUPS[group]) for tree in _trees_of(regex, name)]


@cache
def _trees_of(regex, name):
    production = PRODUCTIONS[name]
    parts = production.get("parts", ())
    if not parts:
        return [Tree(name)] if regex == production["regex"] else []
    trees = []
    for times in range(2, 8) if name == "or more times" else (None,):
        # Braces of the expression itself are doubled in the pattern; a mark keeps the places of the parts apart.
        first, *rest = production["regex"].format(*["\0"] * len(parts), times=times).split("\0")
        if regex.startswith(first):
            trees += [Tree(name, found_parts, times) for found_parts in _parts(regex[len(first) :], rest, parts)]
    return trees


def _parts(regex, between, groups):
    """All ways to read parts out of an expression, each followed by what stands behind it."""
    if not groups:
        return [()] if regex == "" else []
    splits = []
    end = regex.find(between[0], 1)
    while end > 0:
        heads = _trees(regex[:end], groups[0]) if end < len(regex) or not between[0] else []
        if heads:
            tails = _parts(regex[end + len(between[0]) :], between[1:], groups[1:])
            splits += [(head, *tail) for head in heads for tail in tails]
        end = regex.find(between[0], end + 1) if end < len(regex) else -1
    return splits
