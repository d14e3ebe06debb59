"""What a run would cost, from its real data and the shapes of its model alone.

The sizes of what is kept from step to step are exact; those of activations come from a forward and backward pass of the
largest micro-batch that is run on shapes alone, see ``activations``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import TrainingArguments

from stepjepa.compute.communication import Transfer, transfers
from stepjepa.compute.equal_compute import Pass, Plan, equal_compute
from stepjepa.compute.flop_probe import Cost
from stepjepa.compute.flops import FlopModel
from stepjepa.compute.memory import Part, Sharding, account, choose_sharding
from stepjepa.compute.shapes import empty_model, running
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.flat import FlatForests
from stepjepa.forests.grouping import CPU_PASS_COST, GroupCollator
from stepjepa.forests.preparation import Prepared, prepare
from stepjepa.forests.sampler import Key
from stepjepa.models.checkpointing import enable_selective, refuse_full
from stepjepa.models.loading import LoraSettings
from stepjepa.models.setup import base_model, set_up_shape
from stepjepa.training.activations import Activations, activations_of
from stepjepa.training.batches import as_one_pass, largest_batches, spread
from stepjepa.training.checks import check_positions, refuse_contradictions, refuse_lonely_pairs, refuse_sharding

FULL_STEPS = 8
"""Steps that a sample of the data is repeated to fill."""


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
        bytes: of the forests, which every process holds unless they are streamed.
    """

    records: int
    whole: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """What is printed.

    Attributes:
        model: kind, parameters, dtype.
        encoding: ``forest`` or ``rows``, and why.
        data: see ``preparation.Prepared``.
        processes: number of them.
        step: records of a step, in words.
        tokens: cells of each step of the first epoch, padding included, over all processes.
        text: share of them that is text; None where that is not known.
        epoch_steps: of an epoch.
        steps: of the run.
        largest: the micro-batch whose activations were taken.
        memory: what one process keeps from step to step.
        activations: what one process needs beside that; None if the model can't be run on shapes alone.
        peak: bytes of the worst moment of one process.
        flops: of a step, mean over the first epoch, all processes together; None as above.
        regular_flops: what regular training would pay for the same records.
        micro_flops: of the micro-batches of each step of the first epoch, as ``Plan.micro_costs``.
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
    text: float | None
    epoch_steps: int
    steps: int
    largest: Pass
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
        on_cpu: the run would be on a CPU, where batches are cut by length.
        samples: most micro-batches to run on shapes for the time that they take.
        whole: records of the data set that ``records`` are a sample of; None if they are all.

    Raises:
        UserError: what the run itself would raise before its first step.
    """
    sharding = choose_sharding(training, deepspeed, processes)
    model, tokenizer = _empty_model(args, config, records)
    start = time.process_time()
    data = prepare(records, tokenizer, config)
    preparation = Preparation(
        len(data.dataset), whole or len(data.dataset), time.process_time() - start, _forest_bytes(data)
    )
    held_out = prepare(eval_records, tokenizer, config, what="evaluation data") if eval_records else None
    try:
        encoding = _set_up(model, args, config, training, [data, held_out])
        if sharding.words:
            refuse_sharding(config, args.eval_generate)
    except ValueError as error:
        raise UserError(str(error)) from None
    flops = _flops(model, config, training)
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * processes
    # A sample is gone through several times, if need be, to fill some steps.
    count = len(data.dataset)
    times = 1 if whole is None else max(1, math.ceil(min(whole, FULL_STEPS * per_step) / count))
    plan = replace(
        Plan.of(
            flops or FlopModel(Cost(), Cost()),
            [*data.dataset.forests] * times,
            encoding=encoding[0],
            args=training,
            jepa=config,
            pass_cost=CPU_PASS_COST if on_cpu and processes == 1 else None,
        ),
        # On a machine with several devices, a process alone would be given all of them.
        batch_size=training.per_device_train_batch_size,
        batches_per_step=training.gradient_accumulation_steps * processes,
        processes=processes,
    )
    steps = plan.keys(0)
    tokens = [sum(one.shape.rows * one.shape.length for one in plan.passes(keys)) for keys in steps]
    mixed = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    collator = GroupCollator(ForestCollator(tokenizer.pad_token_id or 0, encoding[0]), plan.pass_cost)

    compared = processes if config.compares_pairs else 1

    def run(keys: Sequence[Key]) -> Activations | None:
        present = [key._replace(record=key.record % count) for key in keys if key.record >= 0]
        groups = collator([data.dataset[key] for key in present])["groups"]
        return activations_of(model, groups, config, sharding, mixed, processes=compared)

    found = [(run(keys), keys) for keys in largest_batches(plan, steps, int(model.config.get_text_config().vocab_size))]
    activations, keys = max(found, key=lambda one: one[0].bytes if one[0] else 0)
    largest = as_one_pass(plan.passes(keys))
    quantized = "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None
    accumulates = training.gradient_accumulation_steps > 1
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
    micro = plan.micro_costs(0) if flops else []
    regular = plan.regular_costs(0) if flops else None
    return Estimate(
        model=_describe_model(model),
        encoding=f"{encoding[0]} ({encoding[1]})",
        data=data,
        processes=processes,
        step=_describe_step(plan, training.gradient_accumulation_steps),
        tokens=tokens,
        text=_text_share(plan, steps, tokens) if encoding[0] == "forest" else None,
        epoch_steps=epoch_steps,
        steps=_count_steps(args, training, plan, epoch_steps),
        largest=largest,
        memory=memory,
        activations=activations,
        peak=_peak(memory, activations, sharding, accumulates),
        flops=sum(map(sum, micro)) / len(micro) if micro else None,
        regular_flops=sum(regular) / len(regular) if regular else None,
        micro_flops=micro,
        transfers=transfers(
            model,
            sharding,
            processes=processes,
            micro_batches=training.gradient_accumulation_steps,
            synced=synced,
            mixed=mixed,
            gathered=_gathered(model, config, largest, training, mixed),
        ),
        samples=[
            Sample(cost, seen)
            for cost, keys in (spread(plan, steps, micro, samples) if activations else [])
            if (seen := run(keys))
        ],
        optimizer=_optimizer(memory),
        preparation=preparation,
    )


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
    model: Any,
    args: argparse.Namespace,
    config: JepaConfig,
    training: TrainingArguments,
    prepared: Sequence[Prepared | None],
) -> tuple[str, str]:
    """What ``JepaTrainer`` and the command do to a model and refuse; gives the encoding and its reason."""
    refuse_contradictions(training)
    refuse_lonely_pairs(config, training)
    encoding = set_up_shape(model, config, training.seed)
    base = base_model(model)
    check_positions(base, prepared)
    if args.selective_checkpointing:
        refuse_full(training)
        enable_selective(model)
    elif _checkpoints_whole_blocks(training):
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return encoding


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
    model: Any, config: JepaConfig, largest: Pass, training: TrainingArguments, mixed: torch.dtype | None
) -> int:
    """Bytes of the embeddings that a process sends to each other one, at most, in a step."""
    if not config.compares_pairs:
        return 0
    embedding = model.get_input_embeddings().weight
    width = mixed.itemsize if mixed is not None else embedding.element_size()
    regularized = any((config.sigreg, config.variance, config.covariance))
    sets = (config.jepa_loss_type == "infonce") + 2 * regularized
    return sets * largest.shape.pairs * embedding.shape[1] * width * training.gradient_accumulation_steps


def _optimizer(memory: Sequence[Part]) -> tuple[int, int]:
    sizes = {part.name: part.bytes for part in memory}
    return sizes.get("gradients", 0), sizes.get("optimizer states", 0)


def _forest_bytes(data: Prepared) -> int:
    forests = data.dataset.forests
    return sum(array.nbytes for array in forests.arrays.values()) if isinstance(forests, FlatForests) else 0


def _text_share(plan: Plan, steps: Sequence[Sequence[Key]], tokens: Sequence[int]) -> float:
    """A record that has several rows has text in them that is not measured, so this is of forests alone."""
    shapes = {True: plan.shapes.whole, False: plan.shapes.plain}
    text = sum(shapes[key.with_views][key.record].length for step in steps for key in step if key.record >= 0)
    return text / sum(tokens)


def _count_steps(args: argparse.Namespace, training: TrainingArguments, plan: Plan, epoch_steps: int) -> int:
    if training.max_steps > 0:
        return int(training.max_steps)
    if args.same_flop and any(vars(plan.flops.forward).values()):
        equal = equal_compute(plan, training.num_train_epochs).steps
        return equal if epoch_steps == plan.steps_per_epoch else round(equal * epoch_steps / plan.steps_per_epoch)
    return math.ceil(training.num_train_epochs * epoch_steps)


def _describe_step(plan: Plan, accumulated: int) -> str:
    processes = f"{plan.processes} process{'es' * (plan.processes > 1)}"
    return f"{plan.records_per_step:,} records ({plan.batch_size} x {accumulated} accumulated x {processes})"


def _describe_model(model: Any) -> str:
    base = base_model(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    dtype = str(next(base.parameters()).dtype).removeprefix("torch.")
    return f"{type(base).__name__}, {total:,} parameters, {trained:,} trained, {dtype}"
