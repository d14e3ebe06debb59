"""Losses and monitors on held-out records: exact means, every record once, whatever the number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from stepjepa.batch.dataset import Prepared
from stepjepa.batch.sampler import StepSampler
from stepjepa.objectives.monitors import Window, share
from stepjepa.objectives.objective import jepa_loss
from stepjepa.training.failures import describe_batch, naming_the_batch

if TYPE_CHECKING:
    from stepjepa.training.trainer import JepaTrainer

_MONITORS = ["records", "matched", "shuffled", "pairs", "crossings"]
_SMALLER = "pass --per_device_eval_batch_size 1 or --bf16 true, or begin again with a smaller --max_length"


@torch.no_grad()
def measure(trainer: JepaTrainer, model: Any, prepared: Prepared) -> tuple[dict[str, float], int]:
    """Measure the trainer's objective on all records, with its weights, whatever their schedules.

    The model is in evaluation mode.

    Returns:
        The metrics by name, the same on every process, and how many records they are of.
    """
    objective, size = trainer.objective, trainer.args.per_device_eval_batch_size
    rank, together = trainer.accelerator.process_index, size * trainer.accelerator.num_processes
    keys = list(StepSampler(prepared.dataset.lengths, together, strategy="sequential", multiple=together))
    # Every process runs the same number of batches, empty ones if need be: FSDP waits for all of them.
    batches = [keys[at : at + size] for at in range(rank * size, len(keys), together)]
    window, context = Window(), trainer.context(training=False)
    for batch in DataLoader(prepared.dataset, batch_sampler=batches, collate_fn=trainer.data_collator):

        def say(batch: Any = batch) -> str:
            return f"{describe_batch('the evaluation', batch, prepared.source)}; {_SMALLER}"

        with naming_the_batch(say), trainer.compute_loss_context_manager():
            losses = jepa_loss(model, trainer._prepare_inputs(batch), objective, context=context)
        counts = {f"count_{name}": count for name, count in objective.counts([batch]).items()}
        window.add(**losses.sums, **counts, records=batch["num_records"][0])
        if len(losses.source):
            window.add_pairs(losses.source, losses.target)
    names = [*objective.names, *(f"count_{name}" for name in objective.names), *_MONITORS]
    seen = dict(zip(names, trainer.total(window.totals(names)), strict=True))
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
