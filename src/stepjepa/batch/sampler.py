"""The order of records: the same for one process and many, for any accumulation, and after a resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler


class Key(NamedTuple):
    """What the sampler yields for a place in a batch."""

    record: int  # its index; -1 for an empty place
    with_views: bool = True
    epoch: int = 0  # decides what is drawn for the record


STRATEGIES = ("random", "group_by_length", "sequential")

# Steps whose records are sorted together under group_by_length.
POOL = 50


def draw(seed: int, *place: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: not on any generator, process or resume."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(eq=False)
class StepSampler(Sampler[Key]):
    """Yields one epoch of records in the order in which they are trained.

    The records of an optimizer step are chosen first and then sorted by length, so that its micro-batches are tight:
    that changes no gradient, since losses are normalised over the whole step (except for InfoNCE, see ``tight``). Loss
    dropout is drawn per step, the same on every process. Places that the last step can't fill evenly over processes
    stay empty: no record is repeated.
    """

    lengths: Sequence[int] | NDArray[np.integer]  # tokens of each record's main text
    records_per_step: int  # batch size x accumulation x processes
    _: KW_ONLY
    seed: int = 0
    # 'group_by_length' puts records of like length into one step; 'sequential' keeps the file's order of steps.
    strategy: str = "random"
    jepa_ratio: float = 1.0  # share of steps whose views are run
    tight: bool = True  # sort the records of a step by length; off for losses that compare the pairs of a micro-batch
    multiple: int = 1  # the number of keys is padded to a multiple of this (batch size x processes)
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is yielded next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[Key]:
        steps = self._steps(np.random.default_rng([self.seed, self.epoch]))
        keys: list[Key] = []
        for number, step in enumerate(steps):
            with_views = draw(self.seed, self.epoch, number) < self.jepa_ratio
            members = step.tolist()
            if self.tight:
                members.sort(key=lambda index: (self.lengths[index], index))
            keys.extend(Key(index, with_views, self.epoch) for index in members)
        keys.extend(Key(-1, False, self.epoch) for _ in range(len(self) - len(keys)))
        return iter(keys)

    def _steps(self, generator: np.random.Generator) -> list[np.ndarray]:
        count, size = len(self.lengths), self.records_per_step
        order = np.arange(count) if self.strategy == "sequential" else generator.permutation(count)
        if self.strategy == "group_by_length":
            pool = size * POOL
            parts, lengths = [order[start : start + pool] for start in range(0, count, pool)], np.asarray(self.lengths)
            order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
        steps = [order[start : start + size] for start in range(0, count, size)]
        if self.strategy == "group_by_length":
            # The one short step, if any, stays last, as it must for the count of batches to come out.
            full = [step for step in steps if len(step) == size]
            steps = [full[index] for index in generator.permutation(len(full))] + steps[len(full) :]
        return steps
