"""A cost model of a layer on a CPU, by which packing chooses the fastest way to run a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 512
"""Keys in a block of the CPU's fused attention, which skips only whole blocks behind the causal diagonal."""


@dataclass(frozen=True)
class Costs:
    """Time of the forward and backward pass of one layer; in any unit, since only ratios matter.

    ``objectives/packing.py`` has the constants, and ``benchmarks/fit_costs.py`` measures them.
    """

    token: float  # one token in all but attention
    pair: float  # one query against one key, over all heads
    query: float = 0.0  # gathering the queries of one token, or writing its result to its place
    key: float = 0.0  # gathering the key and the value of one token
    call: float = 0.0  # fixed cost of a call of attention
    forward: float = 0.0  # fixed cost of a forward pass

    def rows(self, sizes: NDArray[np.int64], masked: NDArray[np.bool_] | bool) -> NDArray[np.float64]:
        """Return the time of rows of these sizes, under a dense mask or as plain causal text."""
        pairs = np.where(masked, 1.0, causal_share(sizes)) * sizes * sizes
        time: NDArray[np.float64] = sizes * self.token + pairs * self.pair
        return time

    def unmasked_paths(self, count: NDArray[np.int64], keys: int) -> NDArray[np.float64]:
        """Return the time of attention of ``count`` segments as whole paths of ``keys`` tokens, without a mask."""
        pairs = keys * keys * float(causal_share(keys))
        return np.asarray(count * (keys * (2 * self.query + self.key) + pairs * self.pair) + self.call, np.float64)

    def queries_by_keys(self, count: NDArray[np.int64], queries: NDArray[np.int64], keys: int) -> NDArray[np.float64]:
        """Return the time of attention of ``count`` segments, padded to ``queries`` by ``keys``, with a mask."""
        gathered = count * (2 * queries * self.query + keys * self.key)
        return np.asarray(gathered + count * queries * keys * self.pair + self.call, np.float64)


def causal_share(size: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """Return the share of the pairs of a causal square that fused attention computes: it skips whole blocks of keys."""
    share: NDArray[np.float64] = (1 + 1 / np.maximum(1, np.ceil(np.asarray(size) / BLOCK))) / 2
    return share
