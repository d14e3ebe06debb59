"""Losses and monitors on held-out records: exact means, every record once, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from stepjepa.forests.preparation import Prepared
from stepjepa.forests.sampler import StepSampler
from stepjepa.models.embeddings import Outputs
from stepjepa.objectives.monitors import Window, share
from stepjepa.objectives.objective import Objective, Sums

_MONITORS = ["records", "matched", "shuffled", "pairs", "crossings"]


def measure(
    prepared: Prepared,
    objective: Objective,
    run: Callable[[dict[str, Any]], tuple[Outputs, Sums]],
    *,
    collator: Callable[[list[Any]], dict[str, Any]],
    batch_size: int,
    rank: int,
    world: int,
    total: Callable[[Sequence[float]], list[float]],
) -> tuple[dict[str, float], int]:
    """Run all records and reduce what was seen.

    Args:
        prepared: the records.
        objective: whose parts are measured, with ``lbd`` itself, whatever its schedule.
        run: a collated batch to its outputs and the sums of the parts.
        collator: makes a batch.
        batch_size: records of this process's batches.
        rank: of this process.
        world: number of processes.
        total: numbers of this process to their sums over all processes.

    Returns:
        The metrics by name, the same on every process, and how many records they are of.
    """
    sampler = StepSampler(
        prepared.dataset.lengths, batch_size * world, strategy="sequential", multiple=batch_size * world
    )
    keys = list(sampler)
    # Every process runs the same number of batches, empty ones if need be: FSDP waits for all of them.
    batches = [keys[at : at + batch_size] for at in range(rank * batch_size, len(keys), batch_size * world)]
    window = Window()
    for batch in DataLoader(prepared.dataset, batch_sampler=batches, collate_fn=collator):
        outputs, sums = run(batch)
        labels = sum(group["label_ids"].numel() for group in batch["groups"])
        window.add(**sums, labels=labels, triples=len(outputs.triples))
        window.add(records=sum(group["num_records"][0] for group in batch["groups"]))
        if len(outputs.source):
            window.add_pairs(outputs.source, outputs.target)
    names = ["labels", "triples", *objective.names, *_MONITORS]
    seen = dict(zip(names, total(window.totals(names)), strict=True))
    counts = torch.tensor([seen["labels"], seen["pairs"], seen["triples"]], dtype=torch.float64)
    parts = objective.parts({name: torch.tensor(seen[name]) for name in objective.names}, counts)
    metrics = {name: float(value) for name, value in parts.items()}
    if objective.alignment is not None:
        metrics |= {
            **share("matched_similarity", seen["matched"], seen["pairs"]),
            **share("shuffled_similarity", seen["shuffled"], seen["crossings"]),
            **window.geometry(),
        }
    return metrics, int(seen["records"])
