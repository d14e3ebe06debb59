"""What a training run says when it begins, on one screen: model, objective, data, cost, length, and where it goes."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepjepa.compute.equal_compute import EqualCompute
from stepjepa.models.quantization import parameter_counts
from stepjepa.models.setup import base_model

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from stepjepa.batch.dataset import Prepared
    from stepjepa.config import JepaConfig
    from stepjepa.training.trainer import JepaTrainer

SAMPLED = 512
"""Records whose cost is worked out before a run starts: enough for two digits, and a fraction of a second."""

Row = tuple[str, str]


class Cost(NamedTuple):
    """What a step costs on the average; regular training is that of the same records with the same sharing.

    Attributes:
        tokens: that are computed, padding not counted.
        regular_tokens: in regular training.
        flops: padding counted.
        regular_flops: in regular training.
    """

    tokens: float
    regular_tokens: float
    flops: float
    regular_flops: float


def step_cost(trainer: JepaTrainer) -> Cost:
    """What a step of a run costs on the average, loss dropout included.

    Every k-th step is collated, so that ``SAMPLED`` records or a few steps are.

    Args:
        trainer: with prepared records.
    """
    plan = trainer.plan
    ratio = trainer.jepa.jepa_ratio if trainer.jepa.uses_views else 1.0
    # Which steps drop their views is drawn: a sample of them would say less than both kinds, weighted.
    steps = [([key._replace(with_views=True) for key in keys], keys) for keys in plan.regular.keys(0)]
    stride = max(1, len(steps) * plan.records_per_step // max(SAMPLED, 4 * plan.records_per_step))
    tokens, regular_tokens, flops, regular_flops, records = 0.0, 0, 0.0, 0, 0
    for both in steps[::stride]:
        whole, regular = ([plan.collate(batch) for batch in plan.micro_batches(keys)] for keys in both)
        without = sum(batch["members"].tokens for batch in regular)
        tokens += ratio * sum(batch["members"].tokens for batch in whole) + (1 - ratio) * without
        regular_tokens += without
        flops += ratio * sum(map(plan.flops.of_batch, whole)) + (1 - ratio) * sum(map(plan.flops.of_batch, regular))
        regular_flops += sum(map(plan.regular.flops.of_batch, regular))
        records += sum(key.record >= 0 for key in both[1])
    scale = min(plan.records_per_step, len(plan.records)) / records
    return Cost(*(total * scale for total in (tokens, regular_tokens, flops, regular_flops)))


def run_length(trainer: JepaTrainer) -> tuple[int, int | None]:
    """Steps of a run and of an epoch, as the Trainer will work them out; None for the epoch of a stream."""
    if trainer.prepared is None:
        return trainer.args.max_steps, None
    places = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps * trainer.args.world_size
    epoch = math.ceil(len(trainer.prepared.dataset) / places)
    given = trainer.args.max_steps
    return (given if given > 0 else math.ceil(trainer.args.num_train_epochs * epoch)), epoch


def start_up_rows(
    args: argparse.Namespace,
    trainer: JepaTrainer,
    *,
    stream: str | None = None,
    answers: str | None = None,
    prompts: str | None = None,
    equal: EqualCompute | None = None,
    checkpoint: str | None = None,
) -> list[Row]:
    """The rows to print before the first step.

    Args:
        args: of ``commands.train``.
        trainer: ready to train.
        stream: what there is to say of streamed records.
        answers: what there is to say of answers during training.
        prompts: what there is to say of system prompts.
        equal: of a run that is as long as its compute allows.
        checkpoint: from which the run goes on.
    """
    rows = [("model", _model(args, trainer)), ("mode", _mode(trainer.jepa))]
    rows.append(("loss", _loss(trainer.jepa)))
    if trainer.jepa.uses_views:
        rows.append(("encoding", f"{trainer.encoding} ({trainer.encoding_reason})"))
    if stream is not None:
        rows.append(("data", stream))
    if trainer.prepared is not None:
        rows.append(("data", f"{Path(trainer.prepared.source).name}: {_counts(trainer.prepared, trainer.jepa)}"))
    if prompts is not None:
        rows.append(("prompts", prompts))
    if trainer.prepared_eval is not None:
        rows.append(("held out", _counts(trainer.prepared_eval, trainer.jepa)))
    if answers is not None:
        rows.append(("answers", answers))
    rows += _step(trainer)
    rows.append(("steps", _steps(trainer, equal)))
    going_on = "" if checkpoint is None else f", going on from {Path(checkpoint).name}"
    rows.append(("output", f"{args.output_dir}{going_on}"))
    return rows


def _model(args: argparse.Namespace, trainer: JepaTrainer) -> str:
    trainable, total = parameter_counts(trainer.model)
    trained = "all trained" if trainable == total else f"{trainable:,} of them ({trainable / total:.2%}) trained"
    if args.lora:
        trained += f", LoRA of rank {args.lora_rank}"
    weights = "4 bits" if args.load_in_4bit else "8 bits" if args.load_in_8bit else args.dtype
    mixed = " with bf16" if trainer.args.bf16 else " with fp16" if trainer.args.fp16 else ""
    world = trainer.args.world_size
    where = f"{trainer.args.device.type}{f', {world} processes' if world > 1 else ''}"
    kind = type(base_model(trainer.model)).__name__
    return f"{args.model_name} ({kind}), {total:,} parameters, {trained}; {weights}{mixed} on {where}"


def _mode(config: JepaConfig) -> str:
    if not config.uses_views:
        return f"{config.mode}: plain fine-tuning, no views"
    which = "the first pair" if config.pairs == "first" else "all pairs"
    more = [
        *(["predictors in front"] if config.front_pred else []),
        *(["target predicts source"] if config.reverse_pred else []),
        *([f"pair distance {config.pair_distance}"] if config.pair_distance != 1 else []),
        *([f"{config.pooling} pooling"] if config.pooling != "last" else []),
    ]
    return ", ".join(
        [f"{config.mode}, layout {config.layout}", f"K = {config.predictors}", f"{which} of a record", *more]
    )


def _loss(config: JepaConfig) -> str:
    parts = [f"{config.gamma:g} LM"]
    if config.uses_views:
        schedule = "" if config.lbd_schedule == "constant" else f" ({config.lbd_schedule})"
        parts.append(f"{config.lbd:g} {config.jepa_loss_type}{schedule}")
    parts += [
        f"{getattr(config, name):g} {name}"
        for name in ("sigreg", "variance", "covariance", "stp")
        if getattr(config, name)
    ]
    text = " + ".join(parts)
    if config.uses_views and config.jepa_ratio < 1:
        text += f"; views in {config.jepa_ratio:.0%} of the steps"
    if config.target_grad != "on":
        text += f"; target {'stopped' if config.target_grad == 'stop' else 'of averaged weights'}"
    return text


def _counts(prepared: Prepared, config: JepaConfig) -> str:
    """Counts that people look for, zero or not, and the others where they are not."""
    looked_for = (
        ("records", "over length") if not config.uses_views else ("records", "pairs", "without a pair", "over length")
    )
    return ", ".join(f"{n:,} {name}" for name, n in prepared.counts.items() if n or name in looked_for)


def _step(trainer: JepaTrainer) -> list[Row]:
    training = trainer.args
    sizes = [f"{training.train_batch_size} a batch"]
    if training.gradient_accumulation_steps > 1:
        sizes.append(f"{training.gradient_accumulation_steps} accumulated")
    if training.world_size > 1:
        sizes.append(f"{training.world_size} processes")
    places = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    step = f"{places} records ({' x '.join(sizes)})" if len(sizes) > 1 else f"{places} records"
    if trainer.prepared is None:
        return [("each step", step)]
    cost = step_cost(trainer)
    rows = [("each step", f"{step}, {cost.tokens:,.0f} tokens, about {cost.flops:.2g} FLOPs")]
    if trainer.jepa.uses_views:
        tokens, flops = cost.tokens / cost.regular_tokens, cost.flops / cost.regular_flops
        over = f"{tokens:.2f} of the tokens and {flops:.2f} of the FLOPs of regular training on the same records"
        rows.append(("cost", over))
    return rows


def _steps(trainer: JepaTrainer, equal: EqualCompute | None) -> str:
    training = trainer.args
    if equal is not None:
        length = f"same FLOPs as {training.num_train_epochs:g} regular epochs: {equal.describe()}"
    else:
        total, epoch = run_length(trainer)
        length = f"{total:,}"
        if epoch is not None:
            length += f", one epoch of {epoch:,}" if total == epoch else f", {total / epoch:.3g} epochs of {epoch:,}"
    evaluated = _often(training, "eval") if trainer.prepared_eval is not None else None
    parts = [
        length,
        *([f"evaluated {evaluated}"] if evaluated else []),
        f"saved {_often(training, 'save') or 'at the end'}",
    ]
    schedule = str(getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type))
    return "; ".join([*parts, f"learning rate {training.learning_rate:g} ({schedule}); seed {training.seed}"])


def _often(training: TrainingArguments, what: str) -> str | None:
    """How often the Trainer does something; None for never."""
    strategy = getattr(training, f"{what}_strategy")
    strategy = str(getattr(strategy, "value", strategy))
    if strategy == "no":
        return None
    if strategy != "steps":
        return f"every {strategy}" if strategy == "epoch" else f"by {strategy}"
    every = getattr(training, f"{what}_steps")
    return f"every {every:g} steps" if every >= 1 else f"every {every:.0%} of the run"
