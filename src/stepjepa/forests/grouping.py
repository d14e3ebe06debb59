"""A batch in several forward passes of rows of like length, when that is cheaper than padding.

Padding costs as much as text. Where a pass has little cost of its own (a CPU), the records of a batch are cut into
groups, each padded for itself; all passes share one loss and one backward pass, so that nothing but the time changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from stepjepa.forests.collate import Batch, ForestCollator, Members
from stepjepa.forests.forest import Forest, path

CPU_PASS_COST = 64
"""What one more forward pass costs on a CPU, in tokens of padding that it must save (measured on tiny models, where it
counts most; larger ones only gain)."""


def split_by_length(lengths: Sequence[int], pass_cost: int | None) -> list[list[int]]:
    """Cut rows into groups so that ``sum(rows x longest) + groups x pass_cost`` is smallest.

    Args:
        lengths: tokens of each row.
        pass_cost: what a group costs beside its cells, in cells; None keeps all rows in one, as several processes need
            it, which must run the same number of passes.

    Returns:
        The groups, each a list of indices of ``lengths``, the shortest rows first.
    """
    if pass_cost is None:
        return [list(range(len(lengths)))]
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    # best[j]: least cost of the first j rows in this order; cut[j]: where the last group of that solution begins.
    best = np.zeros(len(order) + 1)
    cut = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        starts = np.arange(end)
        costs = best[:end] + (end - starts) * lengths[order[end - 1]] + pass_cost
        cut[end] = int(costs.argmin())
        best[end] = costs[cut[end]]
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[cut[end] : end])
        end = cut[end]
    return groups[::-1]


@dataclass(frozen=True)
class GroupCollator:
    """Makes the groups of a batch: ``groups``, each as ``ForestCollator`` gives it, and ``members``, what they are of.

    Args:
        collator: makes one group.
        pass_cost: see :func:`split_by_length`.
    """

    collator: ForestCollator
    pass_cost: int | None = None

    def __call__(self, forests: Sequence[Forest | None]) -> Batch:
        """Collate; None stands for an empty place."""
        present = [forest for forest in forests if forest is not None]
        if not present:
            return {"groups": [self.collator(present)], "members": Members()}
        groups = split_by_length([self._row_length(forest) for forest in present], self.pass_cost)
        parts = [[present[index] for index in group] for group in groups]
        return {"groups": [self.collator(part) for part in parts], "members": Members.of(chain.from_iterable(parts))}

    def _row_length(self, forest: Forest) -> int:
        if self.collator.encoding == "forest":
            return len(forest)
        return max(len(path(forest, index)) for index in range(len(forest.segments)))
