"""Several data sets as one: each with its share, and no record twice."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stepjepa.data.records import Record
from stepjepa.errors import UserError


def mix(parts: Sequence[Sequence[Record]], weights: Sequence[float] | None, seed: int) -> list[list[Record]]:
    """What is taken of each data set, in its order there.

    Args:
        parts: the records of each.
        weights: the share of each, in any unit; None takes all records of all.
        seed: draws which records of a data set are taken.

    Returns:
        The largest mixture of these shares in which no record stands twice.

    Raises:
        UserError: a weight is missing or not positive, or gives a data set no record.
    """
    if weights is None:
        return [list(part) for part in parts]
    if len(weights) != len(parts) or not all(0 < weight < float("inf") for weight in weights):
        given = " ".join(f"{weight:g}" for weight in weights)
        raise UserError(
            f"--dataset_weights: expected {len(parts)} positive numbers, one for each --dataset, got {given}"
        )
    scale = min(len(part) / weight for part, weight in zip(parts, weights, strict=True))
    counts = [min(round(scale * weight), len(part)) for part, weight in zip(parts, weights, strict=True)]
    if 0 in counts:
        raise UserError(
            f"--dataset_weights: of data set {counts.index(0) + 1} not one record is taken; raise its weight"
        )
    draw = random.Random(seed)
    drawn = [sorted(draw.sample(range(len(part)), count)) for part, count in zip(parts, counts, strict=True)]
    return [[part[index] for index in indices] for part, indices in zip(parts, drawn, strict=True)]
