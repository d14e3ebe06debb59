"""How often things occur in pairs of a description and its regular expression: to hold one set against another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

_LITERALS = ("a number", "a capital letter", "a lower-case letter", "a letter", "a vowel", "a character", "the string")
_FUNCTIONS = ("containing", "words", "starting with", "ending with", "followed by", "containing only")
_REPETITIONS = ("at least once", "zero or more times", *(f"{times} or more times" for times in range(2, 8)))
_COMPOSITIONS = (" or ", " and ", "not ", " before ", "either ", ", and ")
# Beyond these the published set has nothing.
_STRINGS, _OPERATORS, _BRACKETS = range(5), range(4), range(4)


def _depth(regex: str) -> int:
    """How many brackets stand one in another."""
    return max(accumulate(((character == "(") - (character == ")") for character in regex), initial=0))


def marginals(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Shares and means of a set.

    Args:
        pairs: at least one.

    Returns:
        By name: the share of descriptions with a phrase of the grammar, of pairs with so many strings, ``&`` or
        ``|`` and nested brackets, of expressions that are different; the mean number of words in a description and
        of characters in an expression (their names begin with ``mean``; everything else is a share).
    """
    count = len(pairs)
    found = {
        f"'{phrase.strip()}'": sum(phrase in description for description, _ in pairs) / count
        for phrase in (*_LITERALS, *_FUNCTIONS, *_REPETITIONS, *_COMPOSITIONS)
    }
    strings = [description.count("the string '") for description, _ in pairs]
    operators = [regex.count("&") + regex.count("|") for _, regex in pairs]
    depths = [_depth(regex) for _, regex in pairs]
    for name, values, numbers in (
        ("strings", strings, _STRINGS),
        ("& or |", operators, _OPERATORS),
        ("brackets deep", depths, _BRACKETS),
    ):
        found |= {f"{number} {name}": values.count(number) / count for number in numbers}
    found["different expressions"] = len({regex for _, regex in pairs}) / count
    found["mean words"] = fmean(len(description.split()) for description, _ in pairs)
    found["mean characters"] = fmean(len(regex) for _, regex in pairs)
    return found


def format_comparison(columns: dict[str, Sequence[tuple[str, str]]]) -> str:
    """A table of the marginals of several sets, side by side.

    Args:
        columns: the sets by name.
    """
    measured = {name: marginals(pairs) for name, pairs in columns.items()}
    names = list(next(iter(measured.values())))
    width = max(map(len, names))
    lines = [" " * width + "".join(f"  {name:>10}" for name in measured)]
    for name in names:
        values = [found[name] for found in measured.values()]
        cells = [f"{value:.2f}" if name.startswith("mean") else f"{100 * value:.2f}%" for value in values]
        lines.append(f"{name:<{width}}" + "".join(f"  {cell:>10}" for cell in cells))
    return "\n".join(lines)
