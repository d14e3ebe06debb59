"""The collator and the order of records of a run, for the trainer and for what is said of a run before it starts."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import Prepared
from stepjepa.batch.sampler import StepSampler
from stepjepa.chat.predictors import predictor_ids
from stepjepa.compute.equal_compute import Plan
from stepjepa.compute.flops import FlopModel
from stepjepa.config import JepaConfig
from stepjepa.models.setup import packing
from stepjepa.objectives.objective import Objective


def make_collator(
    model: Any, tokenizer: Any, config: JepaConfig, objective: Objective, *, encoding: str, device: str, processes: int
) -> Collator:
    """The collator of a run of so many processes on devices of a type, for a model that is set up for the objective."""
    return Collator.of(
        config,
        predictor_ids(tokenizer, (config.predictors or 0) if config.uses_views else 0),
        encoding=encoding,
        prompt_labels="prompt_loss" in objective.terms,
        **packing(model, config, device, processes),
        pad_id=tokenizer.pad_token_id or 0,
    )


def make_sampler(
    prepared: Prepared, config: JepaConfig, objective: Objective, args: TrainingArguments, processes: int
) -> StepSampler:
    """The one order in which records are trained on, for any accumulation and number of processes."""
    per_micro_step = args.per_device_train_batch_size * processes
    return StepSampler(
        prepared.dataset.lengths,
        per_micro_step * args.gradient_accumulation_steps,
        strategy=str(args.train_sampling_strategy),
        multiple=per_micro_step,
        seed=args.seed if args.data_seed is None else args.data_seed,
        jepa_ratio=config.jepa_ratio if config.uses_views else 1.0,
        # What pairs are compared with must be drawn from all records, not from those of like length.
        tight=not objective.compares_pairs,
    )


def make_plan(
    flops: FlopModel,
    prepared: Prepared,
    config: JepaConfig,
    sampler: StepSampler,
    collator: Collator,
    *,
    args: TrainingArguments,
    processes: int | None = None,
) -> Plan:
    """What every step of a run will cost; ``processes`` where they are others than those of ``args``."""
    batches_per_step = args.gradient_accumulation_steps * (processes or args.world_size)
    return Plan(
        flops, prepared.dataset, sampler, collator, args.per_device_train_batch_size, batches_per_step, config.plain
    )
