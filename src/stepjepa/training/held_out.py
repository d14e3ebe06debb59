"""Held-out records, in one set or in several with names: losses, monitors, scores of answers and retrieval."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import speed_metrics

from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import Prepared, StepSampler
from stepjepa.batch.micro_batch import Batch
from stepjepa.models.architecture import evaluating
from stepjepa.objectives.monitors import PAIR_SUMS, MetricWindow
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.term import Context
from stepjepa.store.metric_names import UNNAMED
from stepjepa.training.held_out_sets import EvalData
from stepjepa.training.interface import TrainerInterface
from stepjepa.training.optimizers import use_evaluation_weights
from stepjepa.training.stop import StopCallback

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl


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
    objective, context = trainer.objective, trainer.context(training=False)
    model = trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model
    window, counts = MetricWindow(), dict.fromkeys(objective.names, 0.0)
    use_evaluation_weights(trainer.optimizer)
    with evaluating(model):
        for batch in micro_batches(trainer, prepared):
            # The Trainer wraps the model for mixed precision when training begins, which may be later.
            with trainer.accelerator.autocast():
                losses = jepa_loss(model, batch, objective, context=context)
            for name, count in objective.counts([batch]).items():
                counts[name] += count
            window.add(**losses.sums, records=batch.num_records)
            if len(losses.source):
                window.add_pairs(losses.source, losses.target)
    names = [*objective.names, "records", *PAIR_SUMS]
    sums = dict(zip(names, trainer.total(window.totals(names)), strict=True))
    denominators = dict(zip(counts, trainer.total([*counts.values()]), strict=True))
    means = objective.means({name: torch.tensor(sums[name]) for name in objective.names}, denominators)
    metrics = {name: float(value) for name, value in means.items()}
    if objective.of_pairs:
        metrics |= window.monitors(sums, processes=trainer.accelerator.num_processes)
    return metrics, int(sums["records"])


class _DeviceLoader(DataLoader[Any]):
    """Yields micro-batches on a device."""

    device: torch.device

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # the base class has an iterator of its own
        return (batch.to(self.device) for batch in super().__iter__())


def micro_batches(trainer: MeasuringTrainer, prepared: Prepared) -> DataLoader[Any]:
    """Return the micro-batches of this process, on its device.

    Every process has the same number of them, some without records if need be, since FSDP waits for all processes.
    """
    size, rank = trainer.args.per_device_eval_batch_size, trainer.accelerator.process_index
    together = size * trainer.accelerator.num_processes
    keys = list(StepSampler(prepared.dataset.lengths, together, strategy="sequential", multiple=together))
    loader = _DeviceLoader(
        prepared.dataset,
        batch_sampler=[keys[start : start + size] for start in range(rank * size, len(keys), together)],
        collate_fn=trainer.data_collator,
        num_workers=trainer.args.dataloader_num_workers,
        pin_memory=trainer.args.dataloader_pin_memory,
        prefetch_factor=trainer.args.dataloader_prefetch_factor,
        multiprocessing_context=trainer.args.dataloader_multiprocessing_context,
        # Otherwise it draws the seed of its workers from the numbers of the training.
        generator=torch.Generator().manual_seed(0),
    )
    loader.device = trainer.args.device
    return loader


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


# -- the trainer -------------------------------------------------------------------------------------------------------


class EvaluatingTrainer(Trainer):
    """Measures losses, monitors and scores on held-out records, whose micro-batches it also gives.

    A subclass is also a ``DataTrainer``, sets the attributes, and has ``context`` and ``total`` of
    :class:`MeasuringTrainer`.

    Attributes:
        held_out: the held-out records as tokens, by the names of their sets.
        evaluated: metrics of the evaluations since training began, by their steps.
        answer_scores: lets the model answer; None for no scores.
        retrieval_scores: ranks the targets of held-out records; None for no scores.
    """

    held_out: dict[str, Prepared]
    evaluated: dict[int, dict[str, float]]
    _sets_of: Callable[[Any], dict[str, Prepared]]
    answer_scores: Callable[[PreTrainedModel, int, int], dict[str, float]] | None
    retrieval_scores: Callable[[int], dict[str, float]] | None

    def evaluate(
        self,
        eval_dataset: EvalData | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure losses and monitors on held-out records, and scores of answers and retrieval if configured.

        Losses are the terms of the objective; what a subclass adds in ``compute_loss`` is not measured.

        Args:
            eval_dataset: other records than the attribute of this name holds, or the name of one of its sets; without
                scores of answers and retrieval.
            ignore_keys: not used; Trainer passes it.
            metric_key_prefix: put in front of the names of metrics, and of the name of each of several sets.

        Returns:
            Metrics by name, which are also logged.

        Raises:
            ValueError: there are no records.
        """
        self._memory_tracker.start()
        sets = self._sets_of(eval_dataset)
        is_own = sets is self.held_out
        if not sets:
            raise ValueError("evaluate: expected an eval_dataset, got none; pass one here or to JepaTrainer")
        of_all: dict[str, float] = {}
        device = self.args.device
        # Training draws the same numbers with an evaluation as without, whatever scores and callbacks draw.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for number, (name, prepared) in enumerate(sets.items()):
                start = time.perf_counter()
                metrics = evaluate_set(self, name, prepared, metric_key_prefix, with_scores=is_own and number == 0)
                self.meter.pause(time.perf_counter() - start)
                self.log(metrics)
                self.control: TrainerControl = self.callback_handler.on_evaluate(
                    self.args, self.state, self.control, metrics
                )
                # Now, since callbacks may add metrics.
                of_all |= metrics
        if is_own and metric_key_prefix == "eval":
            self.evaluated[self.state.global_step] = of_all
        self._memory_tracker.stop_and_update_metrics(of_all)
        return of_all

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether ``save_strategy best`` saves a checkpoint: of a new best, or to stop on a signal."""
        is_new_best = bool(super()._determine_best_metric(metrics, trial))
        stops = (callback for callback in self.callback_handler.callbacks if isinstance(callback, StopCallback))
        return is_new_best or any(stop.is_requested for stop in stops)

    def get_eval_dataloader(self, eval_dataset: EvalData | None = None) -> DataLoader[Any]:
        """Return the micro-batches that :meth:`evaluate` measures, on the device, for ``compute_loss``.

        Args:
            eval_dataset: as for :meth:`evaluate`, but one set; None for the trainer's own.

        Raises:
            ValueError: there are no records, or several sets of them.
        """
        return self._loader("get_eval_dataloader", self._sets_of(eval_dataset))

    def get_test_dataloader(self, test_dataset: EvalData) -> DataLoader[Any]:
        """Return the micro-batches of other records, as :meth:`get_eval_dataloader` does."""
        return self._loader("get_test_dataloader", {} if test_dataset is None else self._sets_of(test_dataset))

    def _loader(self, method: str, sets: dict[str, Prepared]) -> DataLoader[Any]:
        """Return the micro-batches of the only set; ``method`` is named in the error for none or several."""
        if len(sets) != 1:
            got = (
                f"the sets {', '.join(sets)}; pass one of them"
                if sets
                else "none; pass a list of dicts or a file's name"
            )
            raise ValueError(f"{method}: expected one set of records, got {got}")
        return micro_batches(self, *sets.values())
