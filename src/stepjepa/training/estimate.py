"""What a run would cost, from its real data and the shapes of its model alone.

The sizes of what is kept from step to step are exact; those of activations come from a forward and backward pass of the
largest micro-batch that is run on shapes alone, see ``shapes`` and ``live_memory``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from stepjepa.compute.equal_compute import Pass, Plan, equal_compute
from stepjepa.compute.flop_probe import Cost
from stepjepa.compute.flops import FlopModel
from stepjepa.compute.live_memory import LiveMemory
from stepjepa.compute.memory import Part, Sharding, account, choose_sharding
from stepjepa.compute.shapes import empty_batch, empty_model, running
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.grouping import CPU_PASS_COST, GroupCollator
from stepjepa.forests.preparation import Prepared, prepare
from stepjepa.forests.sampler import Key
from stepjepa.models.architecture import choose_encoding
from stepjepa.models.attention import enable_forest
from stepjepa.models.checkpointing import enable_selective, refuse_full
from stepjepa.models.embeddings import forward_groups
from stepjepa.models.loading import LoraSettings
from stepjepa.models.predictor_head import attach_head
from stepjepa.models.setup import check_layer
from stepjepa.objectives.objective import Objective
from stepjepa.training.checks import check_positions, refuse_contradictions, refuse_lonely_pairs


@dataclass(frozen=True)
class Estimate:
    """What is printed.

    Attributes:
        model: kind, parameters, dtype.
        encoding: ``forest`` or ``rows``, and why.
        data: see ``preparation.Prepared``.
        step: records of a step, in words.
        tokens: cells of each step of the first epoch, padding included, over all processes.
        text: share of them that is text; None where that is not known.
        steps: of the run.
        largest: the micro-batch whose activations were taken.
        memory: of one process.
        activations: bytes of the peak; None if the model can't be run on shapes alone.
        flops: of a step, mean over the first epoch; None as above.
        regular_flops: what regular training would pay for the same records.
    """

    model: str
    encoding: str
    data: Prepared
    step: str
    tokens: list[int]
    text: float | None
    steps: int
    largest: Pass
    memory: list[Part]
    activations: int | None
    flops: float | None
    regular_flops: float | None


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
) -> Estimate:
    """Work everything out.

    Args:
        args: see :func:`dry_run`.
        config: see there.
        records: see there.
        eval_records: see there.
        training: made of ``args``.
        deepspeed: DeepSpeed's configuration, if there is one.
        processes: number of them.
        on_cpu: the run would be on a CPU, where batches are cut by length.
    """
    sharding = choose_sharding(training, deepspeed, processes)
    try:
        lora = LoraSettings(args.lora_rank, args.lora_alpha, args.lora_dropout) if args.lora else None
    except ValueError as error:
        raise UserError(f"--{error}") from None
    model, tokenizer = empty_model(
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
    data = prepare(records, tokenizer, config)
    held_out = prepare(eval_records, tokenizer, config, what="evaluation data") if eval_records else None
    try:
        encoding = _set_up(model, args, config, training, [data, held_out])
    except ValueError as error:
        raise UserError(str(error)) from None
    flops = _flops(model, config, training)
    plan = replace(
        Plan.of(
            flops or FlopModel(Cost(), Cost()),
            data.dataset.forests,
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
    collator = GroupCollator(ForestCollator(tokenizer.pad_token_id or 0, encoding[0]), plan.pass_cost)
    candidates = _largest(plan, steps, int(model.config.get_text_config().vocab_size))
    mixed = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    found = []
    for keys in candidates:
        groups = collator([data.dataset[key] for key in keys])["groups"]
        found.append((_activations(model, groups, config, sharding, mixed), keys))
    activations, keys = max(found, key=lambda one: one[0] or 0)
    quantized = "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None
    costs = plan.epoch_costs(0) if flops else None
    regular = plan.regular_costs(0) if flops else None
    shapes = {True: plan.shapes.whole, False: plan.shapes.plain}
    text = sum(shapes[key.with_views][key.record].length for step in steps for key in step if key.record >= 0)
    return Estimate(
        model=_describe_model(model, args),
        encoding=f"{encoding[0]} ({encoding[1]})",
        data=data,
        step=_describe_step(plan, training.gradient_accumulation_steps),
        tokens=tokens,
        # A record that has several rows has text in them that is not measured.
        text=text / sum(tokens) if encoding[0] == "forest" else None,
        steps=_count_steps(args, training, plan),
        largest=_whole(plan.passes(keys)),
        memory=account(
            model,
            optim=str(getattr(training.optim, "value", training.optim)),
            processes=processes,
            sharding=sharding,
            quantized=quantized,
            mixed=mixed,
            ema=config.target_grad == "ema",
        ),
        activations=activations,
        flops=sum(costs) / len(costs) if costs else None,
        regular_flops=sum(regular) / len(regular) if regular else None,
    )


def _set_up(
    model: Any,
    args: argparse.Namespace,
    config: JepaConfig,
    training: TrainingArguments,
    prepared: Sequence[Prepared | None],
) -> tuple[str, str]:
    """What ``JepaTrainer`` does to a model and refuses; gives the encoding and its reason."""
    refuse_contradictions(training)
    refuse_lonely_pairs(config, training)
    base = model.get_base_model() if args.lora else model
    encoding = choose_encoding(base, config.encoding)
    if config.layout == "inplace" and encoding[0] == "rows":
        raise ValueError(f"layout 'inplace' needs encoding 'forest', but {encoding[1]}; use 'branched'")
    if encoding[0] == "forest" and config.uses_views:
        enable_forest(base)
    check_layer(int(base.config.get_text_config().num_hidden_layers), config.jepa_layer)
    check_positions(base, prepared)
    if config.predictor_head != "none":
        attach_head(model, config.predictor_head, training.seed)
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


def _largest(plan: Plan, steps: Sequence[Sequence[Key]], vocabulary: int) -> list[list[Key]]:
    """The micro-batches of the first epoch that may need most: by cells, and by labels where logits are wide."""
    batches: dict[str, tuple[int, list[Key]]] = {}
    for keys in steps:
        for start in range(0, len(keys), plan.batch_size):
            batch = [key for key in keys[start : start + plan.batch_size] if key.record >= 0]
            if not batch:
                continue
            shape = _whole(plan.passes(batch)).shape
            for name, size in (("cells", shape.rows * shape.length), ("logits", shape.labels * vocabulary)):
                if size > batches.get(name, (-1, []))[0]:
                    batches[name] = (size, batch)
    found = [batch for _, batch in batches.values()]
    return found[:1] if found[0] == found[-1] else found


def _whole(passes: Sequence[Pass]) -> Pass:
    """The passes of a micro-batch as one, its rows as long as the longest."""
    first = max(passes, key=lambda one: one.shape.length)
    rows, labels, pairs = (sum(getattr(one.shape, name) for one in passes) for name in ("rows", "labels", "pairs"))
    return first._replace(shape=first.shape._replace(rows=rows, labels=labels, pairs=pairs))


def _activations(
    model: Any, groups: list[dict[str, Tensor]], config: JepaConfig, sharding: Sharding, mixed: torch.dtype | None
) -> int | None:
    """Bytes of all tensors that live at the worst moment of a forward and backward pass of a micro-batch."""
    objective = Objective.from_config(config)
    # A block that was brought together, or weights of 16 bits, need no copy for autocast.
    whole = mixed if sharding.halves or sharding.weights > 1 else None
    autocast = torch.autocast("cpu", dtype=mixed) if mixed is not None else nullcontext()
    try:
        with running(model, whole), LiveMemory(model) as memory:
            batch = empty_batch(groups)
            with autocast:
                outputs = forward_groups(model, batch, config.jepa_layer)
            counts = torch.empty(3, dtype=torch.float64)
            sums = objective.sums(outputs)
            del outputs
            objective.parts(sums, counts, 0.0)["loss"].backward()
            return memory.peak
    except RuntimeError:
        return None


def _count_steps(args: argparse.Namespace, training: TrainingArguments, plan: Plan) -> int:
    if training.max_steps > 0:
        return int(training.max_steps)
    if args.same_flop and any(vars(plan.flops.forward).values()):
        return equal_compute(plan, training.num_train_epochs).steps
    return math.ceil(training.num_train_epochs * plan.steps_per_epoch)


def _describe_step(plan: Plan, accumulated: int) -> str:
    processes = f"{plan.processes} process{'es' * (plan.processes > 1)}"
    return f"{plan.records_per_step:,} records ({plan.batch_size} x {accumulated} accumulated x {processes})"


def _describe_model(model: Any, args: argparse.Namespace) -> str:
    base = model.get_base_model() if args.lora else model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    dtype = str(next(base.parameters()).dtype).removeprefix("torch.")
    return f"{type(base).__name__}, {total:,} parameters, {trained:,} trained, {dtype}"
