"""Held-out records, in one set or in several with names: losses, monitors, scores of answers and retrieval."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import IntervalStrategy, speed_metrics

from stepjepa.base.errors import shown
from stepjepa.base.similar_names import did_you_mean
from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import Prepared, StepSampler
from stepjepa.models.architecture import evaluating
from stepjepa.objectives.monitors import MONITORS, PAIR_SUMS, MetricWindow
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.term import Context
from stepjepa.store.metric_names import UNNAMED, named_metric
from stepjepa.training.interface import TrainerInterface

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

# Metrics that Trainer adds to every evaluation.
_ADDED = ("epoch", "runtime", "samples_per_second")
# Prefix of metrics -> the setting of a run that measures them.
_SCORED_BY = {"answer": "`eval_generate N`", "retrieval": "`eval_retrieval`"}


def _metrics(objective: Objective) -> list[str]:
    """Return the names of what :func:`measure` measures."""
    return [*objective.names, "loss", *(MONITORS if objective.of_pairs else ())]


def check_set_names(names: Iterable[str], objective: Objective) -> None:
    """Raise a ``ValueError`` for a name of a set whose metrics would have the names of other ones, or that is none."""
    for name in names:
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"eval_dataset: expected texts as the names of data sets, got {name!r}")
        clash = [metric for metric in _metrics(objective) if named_metric(name, metric) in objective.names]
        if name in _SCORED_BY or (name != UNNAMED and clash):
            other = f"eval_{name}_{clash[0] if clash else 'NAME'}"
            raise ValueError(f"eval_dataset: {shown(name)} gives {other}, which is another metric; name it otherwise")


def check_best_metric(
    args: TrainingArguments,
    objective: Objective,
    scores: Mapping[str, object | None],
    sets: Collection[str] = (UNNAMED,),
) -> None:
    """Raise a ``ValueError`` for a ``metric_for_best_model`` that no evaluation measures.

    Trainer would notice that at the first evaluation, and end the run.

    Args:
        args: the Trainer's arguments.
        objective: what the run trains.
        scores: prefix of metrics -> the object that scores them, None for none. Its ``names``, if any, are known.
        sets: names of the sets of held-out records.
    """
    name = str(args.metric_for_best_model or "").removeprefix("eval_")
    if not name or args.eval_strategy == IntervalStrategy.NO:
        return
    metrics = [*_metrics(objective), *_ADDED]
    names = [named_metric(of_set, metric) for of_set in sets or (UNNAMED,) for metric in metrics]
    for prefix, scored in scores.items():
        if scored is not None and name.startswith(f"{prefix}_") and name not in names:
            # Asked only now: a task scores an answer to name its scores.
            names += [f"{prefix}_{score}" for score in getattr(scored, "names", (name.removeprefix(f"{prefix}_"),))]
    if name not in names:
        remedy = did_you_mean(name, names) or f"; expected one of {', '.join(names)}"
        for prefix, setting in _SCORED_BY.items():
            if scores.get(prefix) is None and name.startswith(f"{prefix}_"):
                remedy = f"; add {setting}, or name one of {', '.join(names)}"
        raise ValueError(f"metric_for_best_model: no evaluation of this run measures {shown(name)}{remedy}")


class MeasuringTrainer(TrainerInterface, Protocol):
    """Attributes of a ``JepaTrainer`` that an evaluation uses, beside those of :class:`TrainerInterface`."""

    objective: Objective
    data_collator: Collator
    answer_scores: Callable[[PreTrainedModel, int, int], dict[str, float]] | None
    retrieval_scores: Callable[[int], dict[str, float]] | None

    def context(self, *, training: bool = True) -> Context: ...


def evaluate_set(
    trainer: MeasuringTrainer, name: str, prepared: Prepared, prefix: str, *, with_scores: bool
) -> dict[str, float]:
    """Return the metrics of a set of held-out records, and their speed, under the names that they have in logs.

    Args:
        trainer: a ``JepaTrainer``; every process must call this.
        name: of the set; :data:`UNNAMED` for the only one.
        prepared: its records as tokens.
        prefix: put in front of all names.
        with_scores: also return the scores of answers and of retrieval. They are of records of their own, so their
            names have none of a set.
    """
    start, of_set = time.time(), prefix if name == UNNAMED else f"{prefix}_{name}"
    measured, records = measure(trainer, prepared)
    metrics = {f"{of_set}_{metric}": value for metric, value in measured.items()}
    if with_scores:
        scores = score_answers(trainer) | score_retrieval(trainer)
        metrics |= {f"{prefix}_{score}": value for score, value in scores.items()}
    speed: dict[str, float] = speed_metrics(of_set, start, num_samples=records)
    return metrics | speed


@torch.no_grad()
def measure(trainer: MeasuringTrainer, prepared: Prepared) -> tuple[dict[str, float], int]:
    """Measure the objective of a trainer on all records; terms have the weights that they have without a schedule.

    Args:
        trainer: a ``JepaTrainer``; every process must call this.
        prepared: the records as tokens.

    Returns:
        The metrics by name, the same on every process, and the number of records.
    """
    objective, size = trainer.objective, trainer.args.per_device_eval_batch_size
    model = trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model
    context = trainer.context(training=False)
    rank, together = trainer.accelerator.process_index, size * trainer.accelerator.num_processes
    keys = list(StepSampler(prepared.dataset.lengths, together, strategy="sequential", multiple=together))
    # Every process runs the same number of batches, empty ones if need be: FSDP waits for all of them.
    batches = [keys[at : at + size] for at in range(rank * size, len(keys), together)]
    window = MetricWindow()
    loader = DataLoader(
        prepared.dataset,
        batch_sampler=batches,
        collate_fn=trainer.data_collator,
        num_workers=trainer.args.dataloader_num_workers,
        pin_memory=trainer.args.dataloader_pin_memory,
    )
    with evaluating(model):
        for batch in loader:
            # The Trainer wraps the model for mixed precision when training begins, which may be later.
            with trainer.accelerator.autocast():
                losses = jepa_loss(model, batch.to(trainer.args.device), objective, context=context)
            counts = {f"count_{name}": count for name, count in objective.counts([batch]).items()}
            window.add(**losses.sums, **counts, records=batch.num_records)
            if len(losses.source):
                window.add_pairs(losses.source, losses.target)
    names = [*objective.names, *(f"count_{name}" for name in objective.names)]
    names += ["records", *PAIR_SUMS]
    summed = dict(zip(names, trainer.total(window.totals(names)), strict=True))
    sums = {name: torch.tensor(summed[name]) for name in objective.names}
    means = objective.means(sums, {name: summed[f"count_{name}"] for name in objective.names})
    metrics = {name: float(value) for name, value in means.items()}
    if objective.of_pairs:
        metrics |= window.monitors(summed, processes=trainer.accelerator.num_processes)
    return metrics, int(summed["records"])


def score_answers(trainer: MeasuringTrainer) -> dict[str, float]:
    """Return the mean over all processes of each score of the trainer's ``answer_scores``; empty without it."""
    if trainer.answer_scores is None:
        return {}
    accelerator = trainer.accelerator
    with evaluating(trainer.model), accelerator.autocast():
        sums = trainer.answer_scores(trainer.model, accelerator.process_index, accelerator.num_processes)
    totals = dict(zip(sums, trainer.total(list(sums.values())), strict=True))
    count = totals.pop("answers")
    return {f"answer_{name}": total / count for name, total in totals.items()}


def score_retrieval(trainer: MeasuringTrainer) -> dict[str, float]:
    """Return the metrics of the trainer's ``retrieval_scores``; empty without it."""
    if trainer.retrieval_scores is None:
        return {}
    with trainer.accelerator.autocast():
        metrics = trainer.retrieval_scores(trainer.args.per_device_eval_batch_size)
    return {f"retrieval_{name}": value for name, value in metrics.items()}
