"""Which micro-batches of a planned epoch are worth a look: those that need most, and some from cheap to dear."""

from __future__ import annotations

from collections.abc import Sequence

from stepjepa.compute.equal_compute import Pass, Plan
from stepjepa.forests.sampler import Key


def largest_batches(plan: Plan, steps: Sequence[Sequence[Key]], vocabulary: int) -> list[list[Key]]:
    """The micro-batches of the first epoch that may need most: by cells, by masks, by labels where logits are wide."""
    batches: dict[str, tuple[int, list[Key]]] = {}
    for keys in steps:
        for micro in plan.micro_batches(keys):
            batch = [key for key in micro if key.record >= 0]
            if not batch:
                continue
            passes = [one.shape for one in plan.passes(batch)]
            sizes = {
                "cells": sum(one.rows * one.length for one in passes),
                "masks": sum(one.rows * one.length**2 for one in passes),
                "logits": sum(one.labels for one in passes) * vocabulary,
            }
            for name, size in sizes.items():
                if size > batches.get(name, (-1, []))[0]:
                    batches[name] = (size, batch)
    found: list[list[Key]] = []
    for _, batch in batches.values():
        if batch not in found:
            found.append(batch)
    return found


def as_one_pass(passes: Sequence[Pass]) -> Pass:
    """The passes of a micro-batch as one, its rows as long as the longest."""
    first = max(passes, key=lambda one: one.shape.length)
    rows, labels, pairs = (sum(getattr(one.shape, name) for one in passes) for name in ("rows", "labels", "pairs"))
    return first._replace(shape=first.shape._replace(rows=rows, labels=labels, pairs=pairs))


def spread(
    plan: Plan, steps: Sequence[Sequence[Key]], micro: Sequence[Sequence[float]], count: int
) -> list[tuple[float, Sequence[Key]]]:
    """Micro-batches from the cheapest to the dearest, at equal distances in their order."""
    batches = [batch for keys in steps for batch in plan.micro_batches(keys)]
    costs = [cost for costs in micro for cost in costs]
    order = sorted((i for i in range(len(batches)) if any(k.record >= 0 for k in batches[i])), key=costs.__getitem__)
    if count >= len(order):
        return [(costs[i], batches[i]) for i in order]
    places = [round(place * (len(order) - 1) / max(count - 1, 1)) for place in range(count)]
    return [(costs[order[place]], batches[order[place]]) for place in places]
