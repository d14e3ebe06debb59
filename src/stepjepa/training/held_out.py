"""Losses and monitors on held-out records: exact means, every record once, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from stepjepa.batch.collate import Batch
from stepjepa.batch.dataset import Prepared
from stepjepa.batch.sampler import StepSampler
from stepjepa.objectives.monitors import Window, share
from stepjepa.objectives.objective import Losses, Objective
from stepjepa.training.meter import Total

_MONITORS = ["records", "matched", "shuffled", "pairs", "crossings"]


def measure(
    prepared: Prepared,
    objective: Objective,
    run: Callable[[Batch], Losses],
    *,
    collator: Callable[[list[Any]], Batch],
    batch_size: int,
    rank: int,
    processes: int,
    total: Total,
) -> tuple[dict[str, float], int]:
    """Run all records and reduce what was seen.

    Args:
        prepared: the records.
        objective: whose terms are measured, with their weights, whatever their schedules.
        run: runs a collated batch.
        collator: makes a batch.
        batch_size: records of this process's batches.
        rank: of this process.
        processes: number of them.
        total: sums numbers over processes.

    Returns:
        The metrics by name, the same on every process, and how many records they are of.
    """
    together = batch_size * processes
    keys = list(StepSampler(prepared.dataset.lengths, together, strategy="sequential", multiple=together))
    # Every process runs the same number of batches, empty ones if need be: FSDP waits for all of them.
    batches = [keys[at : at + batch_size] for at in range(rank * batch_size, len(keys), together)]
    window = Window()
    for batch in DataLoader(prepared.dataset, batch_sampler=batches, collate_fn=collator):
        losses = run(batch)
        window.add(**losses.sums, **{f"count_{name}": count for name, count in objective.counts([batch]).items()})
        window.add(records=batch["num_records"][0])
        if len(losses.source):
            window.add_pairs(losses.source, losses.target)
    names = [*objective.names, *(f"count_{name}" for name in objective.names), *_MONITORS]
    seen = dict(zip(names, total(window.totals(names)), strict=True))
    sums = {name: torch.tensor(seen[name]) for name in objective.names}
    means = objective.means(sums, {name: seen[f"count_{name}"] for name in objective.names})
    metrics = {name: float(value) for name, value in means.items()}
    if objective.of_pairs:
        metrics |= {
            **share("matched_similarity", seen["matched"], seen["pairs"]),
            **share("shuffled_similarity", seen["shuffled"], seen["crossings"]),
            **window.geometry(),
        }
    return metrics, int(seen["records"])
