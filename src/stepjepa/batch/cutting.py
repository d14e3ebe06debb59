"""Cut things in order into consecutive parts of least cost: rows, passes and calls are all chosen so."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def cheapest_parts(count: int, costs: Callable[[NDArray[np.int64], int], NDArray[np.float64]]) -> list[tuple[int, int]]:
    """Cut ``range(count)`` into consecutive parts of least total cost, by dynamic programming.

    ``costs(first, last)`` are the costs of the parts ``range(first[i], last)``.
    """
    # best[j]: least cost of cutting range(j); before[j]: start of the last part of that solution.
    best, before = np.zeros(count + 1), [0] * (count + 1)
    for last in range(1, count + 1):
        totals = best[:last] + costs(np.arange(last), last)
        before[last] = int(totals.argmin())
        best[last] = totals[before[last]]
    parts, last = [], count
    while last:
        parts.append((before[last], last))
        last = before[last]
    return parts[::-1]


def balanced_cut(lengths: NDArray[np.int64], shared: NDArray[np.int64], row_length: int) -> list[int]:
    """Cut sorted sequences into rows so that number of rows x length of the longest row is least.

    Args:
        lengths: ``[S]`` tokens of each sequence.
        shared: ``[S]`` length of the prefix that it shares with the previous one.
        row_length: maximum tokens of a row, unless a single sequence is longer.

    Returns:
        The index of the first sequence of every row, and S.
    """
    added = np.concatenate([[0], np.cumsum(lengths - shared)])

    def rows_within(cap: int) -> list[int]:
        """Return the bounds of rows of at most ``cap`` tokens, filled one after the other."""
        bounds = [0]
        while (first := bounds[-1]) < len(lengths):
            # A row holds its first sequence in full, and the tokens that the others add.
            limit = added[first + 1] + cap - lengths[first]
            bounds.append(int(np.searchsorted(added, limit, "right")) - 1)
        return bounds

    def cells(bounds: list[int]) -> int:
        firsts, lasts = np.array(bounds[:-1]), np.array(bounds[1:])
        return int((added[lasts] - added[firsts + 1] + lengths[firsts]).max()) * len(firsts)

    longest = int(lengths.max())
    caps = np.unique(np.linspace(longest, max(longest, row_length), 24).astype(int)).tolist()
    return min(map(rows_within, caps), key=cells)
