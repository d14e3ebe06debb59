"""Split the records of a file into those that are trained on and those that are held out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def draw_held_out(keys: Sequence[int], size: int, seed: int) -> NDArray[np.bool_]:
    """Draw records at random so that no question is on both sides.

    If no two keys are equal, these are the first ``size`` records of a shuffled list.

    Args:
        keys: of each record the hash of its question.
        size: wanted number of records.
        seed: the same seed draws the same records.

    Returns:
        bool ``[N]``: whether a record is held out. They are at most ``size``; fewer where the records of one question
        are more than are still wanted.
    """
    _, question, repeats = np.unique(np.asarray(keys, np.uint64), return_inverse=True, return_counts=True)
    drawn, left = np.zeros(len(repeats), np.bool_), size
    for index in random.Random(seed).sample(range(len(keys)), len(keys)):
        if not drawn[question[index]] and repeats[question[index]] <= left:
            drawn[question[index]] = True
            left -= int(repeats[question[index]])
    return drawn[question]
