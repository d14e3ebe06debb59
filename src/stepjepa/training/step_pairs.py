"""The pairs of the optimizer step that is being trained, for terms that compare all of them (``compare_pairs_in``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.cached_pairs import CachedPairs
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.pair_cache import cache_pairs, terms_of_steps
from stepjepa.objectives.term import Context
from stepjepa.training.flops import has_first_pass
from stepjepa.training.noise import noise_of_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments


class _Trainer(Protocol):
    """The attributes of a ``JepaTrainer`` that the first pass of a step needs."""

    args: TrainingArguments
    model: PreTrainedModel
    jepa: JepaConfig
    objective: Objective
    neftune_noise_alpha: float | None
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool


class StepPairs:
    """Runs the first pass of a step when the loss of its first micro-batch is asked for."""

    def __init__(self, trainer: _Trainer) -> None:
        self._trainer = trainer
        first_pass = has_first_pass(trainer.jepa, trainer.args)
        self._terms = terms_of_steps(trainer.jepa, trainer.objective.terms) if first_pass else {}
        self._batches: Sequence[Batch] = ()
        self._cached: dict[object, CachedPairs] = {}

    def begin_step(self, batches: Sequence[Batch], counts: Mapping[str, float]) -> None:
        """Begin a step.

        Args:
            batches: its micro-batches on this process, on the model's device.
            counts: of the step, over all processes; one without pairs needs no first pass.
        """
        has_pairs = any(counts[name] > 0 for name in self._terms)
        self._batches, self._cached = batches if has_pairs else (), {}

    def add_to(self, context: Context, model: nn.Module, batch: Batch) -> Context:
        """Return the context of a micro-batch with what the pairs of the step mean for it.

        Args:
            context: of the step.
            model: wrapped or not.
            batch: a micro-batch of the step.
        """
        if self._batches and not self._cached:
            trainer = self._trainer
            # Sharded weights are gathered by all processes, in the forward pass of the wrapped model.
            sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
            cached = cache_pairs(
                model if sharded else trainer.model,
                self._batches,
                self._terms,
                context,
                layer=trainer.objective.layer,
                every_batch=sharded,
                around=partial(noise_of_sequences, trainer.model, alpha=trainer.neftune_noise_alpha),
            )
            keys = [of_step.records.rng_keys for of_step in self._batches]
            self._cached = dict(zip(keys, cached, strict=True))
        return replace(context, cached=self._cached[batch.records.rng_keys]) if self._batches else context
