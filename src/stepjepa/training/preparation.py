"""What ``JepaTrainer`` and ``--dry_run`` share: collator, order of records, plan, refusals before the first step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from stepjepa.batch.collate import Collator, Item
from stepjepa.batch.dataset import STRATEGIES, Prepared, StepSampler
from stepjepa.chat.tokens import predictor_ids
from stepjepa.compute.equal_compute import Plan
from stepjepa.compute.flops import FlopModel
from stepjepa.config import JepaConfig
from stepjepa.models.architecture import has_experts
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


# Arguments of Trainer's own token count, last batch and evaluation loop, none of which is used here.
WITHOUT_EFFECT = (
    "include_num_input_tokens_seen",
    "dataloader_drop_last",
    "bf16_full_eval",
    "fp16_full_eval",
    "prediction_loss_only",
    "eval_accumulation_steps",
    "batch_eval_metrics",
    "average_tokens_across_devices",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "include_for_metrics",
    "length_column_name",
    "hub_always_push",
)


def refuse_contradictions(args: TrainingArguments) -> None:
    """Raise a ``ValueError`` for options of Trainer that would be ignored or wrong here."""
    if args.label_smoothing_factor:
        raise ValueError(f"label_smoothing_factor: expected 0 with this objective, got {args.label_smoothing_factor}")
    if str(args.train_sampling_strategy) not in STRATEGIES:
        raise ValueError(
            f"train_sampling_strategy: expected one of {', '.join(STRATEGIES)}, got '{args.train_sampling_strategy}'"
        )
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size: expected False, since it would change the records of a step")
    if getattr(args.accelerator_config, "split_batches", False):
        raise ValueError("accelerator_config: expected split_batches false: it would change the records of a step")
    if args.push_to_hub and args.hub_strategy not in (HubStrategy.END, HubStrategy.EVERY_SAVE):
        raise ValueError(
            f"hub_strategy: expected end or every_save, since only models are uploaded, got {args.hub_strategy.value}"
        )
    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    for name in WITHOUT_EFFECT:
        default = [] if name == "include_for_metrics" else defaults.get(name)
        if name in defaults and getattr(args, name) != default:
            raise ValueError(f"{name}: has no effect with this trainer; leave it at {defaults[name]}")


def refuse_unsized(*datasets: Any) -> None:
    """Raise a ``ValueError`` for records without a length: training needs to know all of them before its first step."""
    for data in datasets:
        if data is None or isinstance(data, str | os.PathLike | Prepared):
            continue
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise ValueError(
                f"expected records with a length, got {type(data).__name__}; pass a list, a datasets.Dataset, or the "
                "name of a file or of a data set on the hub"
            )


def adjust(args: TrainingArguments, model: nn.Module) -> None:
    """Settings of Trainer that follow from what it trains here."""
    args.remove_unused_columns = False
    # A process that only the CPU serves has nothing to pin.
    args.dataloader_pin_memory = args.dataloader_pin_memory and torch.accelerator.is_available()
    if args.ddp_find_unused_parameters is None and not has_experts(model):
        # All weights take part in every step; looking for others costs a walk through the graph.
        args.ddp_find_unused_parameters = False


def refuse_data_parallel(args: TrainingArguments) -> None:
    """Raise a ``ValueError`` where one process with several devices would be given to DataParallel."""
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one device per process, got {args.n_gpu} under DataParallel, which can't carry this objective; "
            "start with torchrun, or set CUDA_VISIBLE_DEVICES to one device"
        )


def refuse_lonely_pairs(objective: Objective, config: JepaConfig, args: TrainingArguments) -> None:
    """Raise a ``ValueError`` where terms compare the pairs of a micro-batch and there is only one."""
    if objective.compares_pairs and config.pairs == "first" and args.train_batch_size * args.world_size == 1:
        raise ValueError(
            "infonce, sigreg, variance and covariance compare the pairs of a micro-batch, and a batch size of 1 has "
            "one; raise --batch_size (and lower --grad_accum), or take another loss"
        )


def refuse_sharding(config: JepaConfig, answer_scores: object | None) -> None:
    """Raise a ``ValueError`` for what can't be done where each process holds a part of the weights."""
    if answer_scores is not None:
        raise ValueError("answer_scores: expected None, since sharded weights can't generate; evaluate afterwards")
    if config.target_grad == "ema":
        raise ValueError(
            "target_grad 'ema' keeps a whole second set of weights, which sharded training has no place for; use "
            "'stop', or train without FSDP and DeepSpeed"
        )


def check_positions(collator: Collator, prepared: Sequence[Prepared | None]) -> None:
    """Raise a ``ValueError`` where a record is longer than the model has positions, before the first step."""
    for data in prepared:
        if data is None or collator.positions is None or not len(data.dataset):
            continue
        # A view by itself can be longer than the text that it is of, by its template; twice as long it is not.
        if 2 * int(data.dataset.lengths.max()) + len(collator.predictors) > collator.positions:
            for number in range(len(data.dataset)):
                collator.sequences(cast(Item, data.dataset[number]))
