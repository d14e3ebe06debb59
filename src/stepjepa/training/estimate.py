"""What a run would cost, from its real data and the shapes of its model alone.

The sizes of what is kept from step to step are exact; those of activations come from a forward and backward pass of the
largest micro-batch that is run on shapes alone, see ``activations``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import Prepared, prepare
from stepjepa.batch.sampler import Key, StepSampler
from stepjepa.compute.communication import Transfer, transfers
from stepjepa.compute.equal_compute import Plan, equal_compute
from stepjepa.compute.flop_probe import Cost
from stepjepa.compute.flops import FlopModel, Shape
from stepjepa.compute.memory import Part, Sharding, account, choose_sharding
from stepjepa.compute.shapes import empty_model, running
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.models.checkpointing import enable_selective, refuse_full
from stepjepa.models.heads import attach_heads
from stepjepa.models.loading import LoraSettings
from stepjepa.models.setup import base_model, packing, set_up_attention
from stepjepa.objectives.objective import Objective
from stepjepa.text.predictors import predictor_ids
from stepjepa.training.activations import Activations, activations_of
from stepjepa.training.checks import check_positions, refuse_contradictions, refuse_lonely_pairs, refuse_sharding

FULL_STEPS = 8
"""Steps that a sample of the data is gone through again and again to fill."""


@dataclass(frozen=True)
class Sample:
    """A micro-batch that was run on shapes to see what it asks of a device.

    Attributes:
        flops: by the plan.
        activations: what was seen.
    """

    flops: float
    activations: Activations


@dataclass(frozen=True)
class Preparation:
    """What preparing some records took.

    Attributes:
        records: how many.
        whole: how many there are of the data set.
        seconds: of this process, on one core or several.
    """

    records: int
    whole: int
    seconds: float


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a planned epoch.

    Attributes:
        keys: its records.
        shape: of its rows.
        tokens: that are computed, padding not counted.
        plain_tokens: of the same records as plain rows without padding.
        flops: 0 where they are not known.
    """

    keys: Sequence[Key]
    shape: Shape
    tokens: int
    plain_tokens: int
    flops: int


@dataclass(frozen=True)
class Estimate:
    """What is printed.

    Attributes:
        model: kind, parameters, dtype.
        encoding: ``tree`` or ``rows``, and why.
        data: see ``dataset.Prepared``.
        processes: number of them.
        step: records of a step, in words.
        tokens: of each step of the first epoch, padding included, over all processes.
        text: share of them that is text.
        plain_tokens: of a step as plain rows without padding, mean over the first epoch.
        epoch_steps: of an epoch.
        steps: of the run.
        largest: shape of the micro-batch whose activations were taken.
        memory: what one process keeps from step to step.
        activations: what one process needs beside that; None if the model can't be run on shapes alone.
        peak: bytes of the worst moment of one process.
        flops: of a step, mean over the first epoch, all processes together; None as above.
        regular_flops: what regular training would pay for the same records.
        micro_flops: of each micro-batch of each step of the first epoch; none if they are not known.
        transfers: what a process sends in a step.
        samples: micro-batches of different cost.
        optimizer: bytes of the weights that are trained and of the optimizer's states, of one process.
        preparation: what preparing the training records took here.
    """

    model: str
    encoding: str
    data: Prepared
    processes: int
    step: str
    tokens: list[int]
    text: float
    plain_tokens: float
    epoch_steps: int
    steps: int
    largest: Shape
    memory: list[Part]
    activations: Activations | None
    peak: int
    flops: float | None
    regular_flops: float | None
    micro_flops: list[list[float]]
    transfers: list[Transfer]
    samples: list[Sample]
    optimizer: tuple[int, int]
    preparation: Preparation


def estimate(
    args: argparse.Namespace,
    config: JepaConfig,
    records: Sequence[Record],
    eval_records: Sequence[Record],
    training: TrainingArguments,
    *,
    deepspeed: dict[str, Any] | None = None,
    processes: int = 1,
    on_cpu: bool = False,
    samples: int = 0,
    whole: int | None = None,
) -> Estimate:
    """Work everything out.

    Args:
        args: of ``commands.train``.
        config: made of them.
        records: to be trained on.
        eval_records: held out; prepared for their errors' sake.
        training: made of ``args``.
        deepspeed: DeepSpeed's configuration, if there is one.
        processes: number of them.
        on_cpu: the run would be on a CPU, where rows of trees are short.
        samples: most micro-batches to run on shapes for the time that they take.
        whole: records of the data set that ``records`` are a sample of; None if they are all.

    Raises:
        UserError: what the run itself would raise before its first step.
    """
    sharding = choose_sharding(training, deepspeed, processes)
    model, tokenizer = _empty_model(args, config, records)
    start = time.process_time()
    data = prepare(records, tokenizer, config)
    preparation = Preparation(len(data.dataset), whole or len(data.dataset), time.process_time() - start)
    held_out = prepare(eval_records, tokenizer, config, what="evaluation data") if eval_records else None
    objective = Objective.from_config(config, training.seed)
    try:
        encoding, reason = _set_up(model, args, config, objective, training)
        collator = Collator.of(
            config,
            predictor_ids(tokenizer, (config.predictors or 0) if config.uses_views else 0),
            encoding=encoding,
            prompt_labels="prompt_loss" in objective.terms,
            **packing(model, config, "cpu" if on_cpu else "cuda", processes),
            pad_id=tokenizer.pad_token_id or 0,
        )
        check_positions(collator, [data, held_out])
        if sharding.words:
            refuse_sharding(config, args.eval_generate)
    except ValueError as error:
        raise UserError(str(error)) from None
    flops = _flops(model, config, training)
    # On a machine with several devices, a process alone would be given all of them.
    batch_size, accumulated = training.per_device_train_batch_size, training.gradient_accumulation_steps
    per_step = batch_size * accumulated * processes
    sampler = StepSampler(
        data.dataset.lengths,
        per_step,
        strategy=str(training.train_sampling_strategy),
        multiple=batch_size * processes,
        seed=training.seed if training.data_seed is None else training.data_seed,
        jepa_ratio=config.jepa_ratio if config.uses_views else 1.0,
        tight=not objective.compares_pairs,
    )
    plan = Plan(
        flops or FlopModel(Cost(), Cost()),
        data.dataset,
        sampler,
        collator,
        batch_size,
        accumulated * processes,
        trains_rows=config.plain,
    )
    steps = _planned(plan, whole)
    batches = [batch for step in steps for batch in step if any(key.record >= 0 for key in batch.keys)]
    mixed = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    compared = processes if objective.compares_pairs else 1

    def run(batch: MicroBatch) -> Activations | None:
        return activations_of(model, plan.collate(batch.keys), objective, sharding, mixed, processes=compared)

    found = [(run(batch), batch.shape) for batch in _largest(batches)]
    activations, largest = max(found, key=lambda one: one[0].bytes if one[0] else 0)
    quantized = "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None
    accumulates = accumulated > 1
    kinds = getattr(training.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    synced = bool(kinds.get("sync_each_batch", False))
    memory = account(
        model,
        optim=str(getattr(training.optim, "value", training.optim)),
        processes=processes,
        sharding=sharding,
        quantized=quantized,
        mixed=mixed,
        ema=config.target_grad == "ema",
        accumulates=accumulates and not synced,
    )
    epoch_steps = plan.steps_per_epoch if whole is None else math.ceil(whole / per_step)
    micro = [[float(batch.flops) for batch in step] for step in steps] if flops else []
    tokens = [sum(batch.shape.cells for batch in step) for step in steps]
    regular = [batch.flops for step in _planned(plan.regular, whole) for batch in step] if flops else None
    return Estimate(
        model=_describe_model(model),
        encoding=f"{encoding} ({reason})",
        data=data,
        processes=processes,
        step=_describe_step(plan, accumulated, processes),
        tokens=tokens,
        text=sum(batch.tokens for batch in batches) / sum(tokens),
        plain_tokens=sum(batch.plain_tokens for batch in batches) / len(steps),
        epoch_steps=epoch_steps,
        steps=_count_steps(args, training, plan, epoch_steps),
        largest=largest,
        memory=memory,
        activations=activations,
        peak=_peak(memory, activations, sharding, accumulates),
        flops=sum(map(sum, micro)) / len(micro) if micro else None,
        regular_flops=sum(regular) / len(steps) if regular else None,
        micro_flops=micro,
        transfers=transfers(
            model,
            sharding,
            processes=processes,
            micro_batches=accumulated,
            synced=synced,
            mixed=mixed,
            gathered=_gathered(model, config, largest, training, mixed),
        ),
        samples=[
            Sample(batch.flops, seen)
            for batch in (_spread(batches, samples) if activations else [])
            if (seen := run(batch))
        ],
        optimizer=_optimizer(memory),
        preparation=preparation,
    )


def _planned(plan: Plan, whole: int | None) -> list[list[MicroBatch]]:
    """The micro-batches of each step of the first epoch; of some full steps where the records are a sample."""
    steps = plan.keys(0)
    if whole is not None:
        per_step, epoch = plan.records_per_step, 0
        keys: list[Key] = []
        while len(keys) < min(whole, FULL_STEPS * per_step):
            # Epoch after epoch, so that no micro-batch has a record twice, which would cost as much as once.
            keys += [key for step in plan.keys(epoch) for key in step if key.record >= 0]
            epoch += 1
        full = range(0, len(keys) - per_step + 1, per_step)
        steps = [keys[first : first + per_step] for first in full] or [keys]

    def look(keys: Sequence[Key]) -> MicroBatch:
        batch = plan.collate(keys)
        shape, members = Shape.of(batch), batch["members"]
        return MicroBatch(keys, shape, members.tokens, members.plain_tokens, plan.flops.of_shape(shape))

    return [[look(keys) for keys in plan.micro_batches(step)] for step in steps]


def _largest(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches that may need most memory: by tokens, by masks, by logits."""
    sizes = (lambda shape: shape.cells, lambda shape: shape.squares, lambda shape: shape.labels)
    chosen = (max(batches, key=lambda batch: size(batch.shape)) for size in sizes)  # called at once
    return list({id(batch): batch for batch in chosen}.values())


def _spread(batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """Micro-batches from the cheapest to the dearest, at equal distances in their order."""
    ordered = sorted(batches, key=lambda batch: batch.flops)
    if count >= len(ordered):
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / max(count - 1, 1))] for place in range(count)]


def _empty_model(args: argparse.Namespace, config: JepaConfig, records: Sequence[Record]) -> tuple[Any, Any]:
    try:
        lora = LoraSettings(args.lora_rank, args.lora_alpha, args.lora_dropout) if args.lora else None
    except ValueError as error:
        raise UserError(f"--{error}") from None
    return empty_model(
        args.model_name,
        texts=(message["content"] for record in records for message in record.messages),
        predictors=config.predictors or 0 if config.uses_views else 0,
        dtype=args.dtype,
        chat_template=args.chat_template,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
        pretrain=args.pretrain,
        train_tokenizer=args.train_tokenizer,
        plain=config.plain,
        lora=lora,
    )


def _set_up(
    model: Any, args: argparse.Namespace, config: JepaConfig, objective: Objective, training: TrainingArguments
) -> tuple[str, str]:
    """What ``JepaTrainer`` and the command do to a model and refuse; gives the encoding and its reason."""
    refuse_contradictions(training)
    refuse_lonely_pairs(objective, config, training)
    encoding, reason = set_up_attention(model, config)
    base = base_model(model)
    attach_heads(model, objective.heads(base.config.get_text_config()))
    if args.selective_checkpointing:
        refuse_full(training)
        enable_selective(model)
    elif _checkpoints_whole_blocks(training):
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return encoding, reason


def _checkpoints_whole_blocks(training: TrainingArguments) -> bool:
    sharding = training.fsdp_config if training.fsdp and isinstance(training.fsdp_config, dict) else {}
    return training.gradient_checkpointing or str(sharding.get("activation_checkpointing", False)).lower() == "true"


def _flops(model: Any, config: JepaConfig, training: TrainingArguments) -> FlopModel | None:
    """None for a model that can't be run on shapes alone, see ``shapes.running``."""
    try:
        with running(model):
            return FlopModel.of(
                model, gradient_checkpointing=_checkpoints_whole_blocks(training), ema=config.target_grad == "ema"
            )
    except RuntimeError:
        return None


def _peak(memory: Sequence[Part], activations: Activations | None, sharding: Sharding, accumulates: bool) -> int:
    """Bytes of the worst moment: in a micro-batch, or when the optimizer steps."""
    kept = sum(part.bytes for part in memory)
    if activations is None:
        return kept
    if accumulates or sharding.gradients > 1:
        return kept + activations.bytes
    # A step begins without gradients, and activations are freed while they are made.
    gradients = sum(part.bytes for part in memory if part.name == "gradients")
    return max(kept, kept - gradients + activations.with_gradients)


def _gathered(
    model: Any, config: JepaConfig, largest: Shape, training: TrainingArguments, mixed: torch.dtype | None
) -> int:
    """Bytes of the embeddings that a process sends to each other one, at most, in a step."""
    if not config.compares_pairs:
        return 0
    embedding = model.get_input_embeddings().weight
    width = mixed.itemsize if mixed is not None else embedding.element_size()
    regularized = any((config.sigreg, config.variance, config.covariance))
    sets = (config.jepa_loss_type == "infonce") + 2 * regularized
    return sets * largest.pairs * embedding.shape[1] * width * training.gradient_accumulation_steps


def _optimizer(memory: Sequence[Part]) -> tuple[int, int]:
    sizes = {part.name: part.bytes for part in memory}
    return sizes.get("gradients", 0), sizes.get("optimizer states", 0)


def _count_steps(args: argparse.Namespace, training: TrainingArguments, plan: Plan, epoch_steps: int) -> int:
    if training.max_steps > 0:
        return int(training.max_steps)
    if args.same_flop and any(vars(plan.flops.forward).values()):
        equal = equal_compute(plan, training.num_train_epochs).steps
        return equal if epoch_steps == plan.steps_per_epoch else round(equal * epoch_steps / plan.steps_per_epoch)
    return math.ceil(training.num_train_epochs * epoch_steps)


def _describe_step(plan: Plan, accumulated: int, processes: int) -> str:
    words = f"{processes} process{'es' * (processes > 1)}"
    return f"{plan.records_per_step:,} records ({plan.batch_size} x {accumulated} accumulated x {words})"


def _describe_model(model: Any) -> str:
    base = base_model(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    dtype = str(next(base.parameters()).dtype).removeprefix("torch.")
    return f"{type(base).__name__}, {total:,} parameters, {trained:,} trained, {dtype}"
