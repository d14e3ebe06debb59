"""How far two sequences are equal."""

from collections.abc import Sequence


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the beginning that two sequences share, which is the index of their first difference."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
