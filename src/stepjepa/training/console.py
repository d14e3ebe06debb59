"""What a training run prints: the first screen, a line of losses or a bar while it goes, and what came of it."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers.trainer_callback import ProgressCallback

from stepjepa.checkpoints import checkpoints
from stepjepa.compute.equal_compute import EqualCompute, Plan
from stepjepa.config import JepaConfig
from stepjepa.models.architecture import base_model
from stepjepa.models.quantization import parameter_counts
from stepjepa.objectives.term import TERMS
from stepjepa.run_folder import METRICS_FILE, RUN_FILE
from stepjepa.terminal import duration
from stepjepa.training.settings import quantized

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from stepjepa.batch.dataset import Prepared
    from stepjepa.training.trainer import JepaTrainer

SAMPLED = 512
"""Records whose cost is worked out before a run starts: enough for two digits, and a fraction of a second."""

Row = tuple[str, str]


class StepCost(NamedTuple):
    """Tokens (without padding) and FLOPs of a step, and of one of regular training on the same records."""

    tokens: float
    flops: float
    regular_tokens: float
    regular_flops: float


def step_cost(trainer: JepaTrainer) -> StepCost:
    """What a step of a run costs on the average, loss dropout included, by every k-th step of an epoch."""
    plan, regular = trainer.plan, trainer.plan.regular
    steps = regular.keys(0)
    stride = max(1, len(steps) * plan.records_per_step // max(SAMPLED, 4 * plan.records_per_step))
    chosen = steps[::stride]

    def mean(plan: Plan, *, with_views: bool) -> np.ndarray[Any, Any]:
        keys = [[key._replace(with_views=with_views) for key in step] for step in chosen]
        batches = [batch for step in keys for batch in plan.micro_batches(step)]
        total = np.array([sum(each["members"].tokens for each in batches), sum(map(plan.flops.of_batch, batches))])
        return total * min(plan.records_per_step, len(plan.records)) / sum(key.record >= 0 for key in chain(*chosen))

    # Which steps drop their views is drawn: a sample of them would say less than both kinds, weighted.
    ratio = trainer.jepa.jepa_ratio if trainer.jepa.uses_views else 0.0
    own = ratio * mean(plan, with_views=True) + (1 - ratio) * mean(plan, with_views=False)
    return StepCost(*own.tolist(), *mean(regular, with_views=False).tolist())


# -- the first screen --------------------------------------------------------------------------------------------------


def first_screen(
    args: argparse.Namespace,
    trainer: JepaTrainer,
    told: Mapping[str, str],
    *,
    equal: EqualCompute | None = None,
    checkpoint: str | None = None,
) -> list[Row]:
    """The rows to print before the first step.

    Args:
        args: of ``commands.train``.
        trainer: ready to train.
        told: rows ``data`` (of a stream), ``prompts`` and ``answers``, where there is something to say of them.
        equal: of a run that is as long as its compute allows.
        checkpoint: that the run is resumed from.
    """
    config, prepared = trainer.jepa, trainer.prepared
    rows: list[tuple[str, str | None]] = [
        ("model", _model(args, trainer)),
        ("objective", _objective(config)),
        ("loss", args.why_loss),
        ("encoding", f"{trainer.encoding} ({trainer.encoding_reason})" if config.uses_views else None),
        ("data", f"{Path(prepared.source).name}: {_counts(prepared, config)}" if prepared else told.get("data")),
        ("prompts", told.get("prompts")),
        ("held out", _counts(trainer.prepared_eval, config) if trainer.prepared_eval is not None else None),
        ("answers", told.get("answers")),
        *_step(trainer),
        ("steps", _steps(trainer, equal)),
        ("output", args.output_dir + ("" if checkpoint is None else f", resumed from {Path(checkpoint).name}")),
    ]
    return [(name, text) for name, text in rows if text is not None]


def _model(args: argparse.Namespace, trainer: JepaTrainer) -> str:
    trainable, total = parameter_counts(trainer.model)
    trained = "all trained" if trainable == total else f"{trainable:,} of them ({trainable / total:.2%}) trained"
    if args.lora:
        trained += f", LoRA of rank {args.lora_rank}"
    weights = quantized(args) or args.dtype
    mixed = " with bf16" if trainer.args.bf16 else " with fp16" if trainer.args.fp16 else ""
    world = trainer.args.world_size
    where = f"{trainer.args.device.type}{f', {world} processes' if world > 1 else ''}"
    kind = type(base_model(trainer.model)).__name__
    return f"{args.model_name} ({kind}), {total:,} parameters, {trained}; {weights}{mixed} on {where}"


def _objective(config: JepaConfig) -> str:
    """Mode and main settings, and all others that are not at their defaults."""
    main = ("layout", "predictors", "pairs", "jepa_loss_type", "lbd") if config.uses_views else ()
    defaults = JepaConfig(mode=config.mode).to_dict()
    shown = [
        f"{name} {value}"
        for name, value in config.to_dict().items()
        if name in main or (name != "mode" and value != defaults[name])
    ]
    return ", ".join([config.mode, *shown])


def _counts(prepared: Prepared, config: JepaConfig) -> str:
    """Counts that people look for, zero or not, and the others where they are not."""
    shown = ("records", "pairs", "without a pair", "over length") if config.uses_views else ("records", "over length")
    return ", ".join(f"{n:,} {name}" for name, n in prepared.counts.items() if n or name in shown)


def _step(trainer: JepaTrainer) -> list[Row]:
    args = trainer.args
    sizes = [f"{args.train_batch_size} a batch"]
    if args.gradient_accumulation_steps > 1:
        sizes.append(f"{args.gradient_accumulation_steps} accumulated")
    if args.world_size > 1:
        sizes.append(f"{args.world_size} processes")
    records = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    step = f"{records} records" + (f" ({' x '.join(sizes)})" if len(sizes) > 1 else "")
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
    args = trainer.args
    length = f"{args.max_steps:,}"
    if equal is not None:
        length = f"same FLOPs as {args.num_train_epochs:g} regular epochs: {equal.describe()}"
    elif trainer.prepared is not None:
        epoch = trainer.plan.steps_per_epoch
        total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
        length = f"{total:,}, {total / epoch:.3g} epochs of {epoch:,}"
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    parts = [
        length,
        f"evaluated {_often(args, 'eval')}" if trainer.prepared_eval is not None else "",
        f"saved {_often(args, 'save')}",
        f"learning rate {args.learning_rate:g} ({schedule})",
        f"seed {args.seed}",
    ]
    return "; ".join(part for part in parts if part)


def _often(args: TrainingArguments, what: str) -> str:
    """How often the Trainer does something."""
    strategy = getattr(args, f"{what}_strategy")
    strategy = str(getattr(strategy, "value", strategy))
    every = getattr(args, f"{what}_steps")
    if strategy == "steps":
        return f"every {every:g} steps" if every >= 1 else f"every {every:.0%} of the run"
    return "at the end" if strategy == "no" else f"every {strategy}"


# -- while it trains ---------------------------------------------------------------------------------------------------


def console_line(logs: dict[str, float]) -> str | None:
    """One line for people out of a line of logs; None for logs that are not losses."""
    prefix = "eval_" if "eval_lm_loss" in logs else ""
    if f"{prefix}lm_loss" not in logs:
        return None
    parts = [f"{term.words}: {logs[prefix + name]:.4f}" for name, term in TERMS.items() if prefix + name in logs]
    parts.append(f"Total: {logs[f'{prefix}loss']:.4f}" if f"{prefix}loss" in logs else "all steps skipped")
    if f"{prefix}matched_similarity" in logs:
        shuffled = logs.get(f"{prefix}shuffled_similarity")
        other = "–" if shuffled is None else f"{shuffled:.3f}"
        parts.append(f"cos matched/shuffled: {logs[f'{prefix}matched_similarity']:.3f}/{other}")
    if f"{prefix}source_rank" in logs:
        parts.append(f"rank: {logs[f'{prefix}source_rank']:.1f}/{logs[f'{prefix}target_rank']:.1f}")
    answers = {name.removeprefix("eval_answer_"): value for name, value in logs.items() if "eval_answer_" in name}
    parts += [f"{name}: {value:.3f}" for name, value in answers.items()]
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tok/s")
    if "pairs_per_second" in logs:
        parts.append(f"{logs['pairs_per_second']:,.1f} pairs/s")
    return ("eval  " if prefix else "") + ", ".join(parts)


class ConsoleCallback(ProgressCallback):
    """The Trainer's bar, with a line of losses for every line of logs; without a bar the lines tell the time left.

    Args:
        bars: draw a bar, on standard error.
    """

    def __init__(self, bars: bool) -> None:
        super().__init__()
        self._bars = bars
        self._first = 0
        self._begun = math.nan

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar."""
        self._first, self._begun, self.current_step = state.global_step, math.nan, 0
        if self._bars:
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)
        if state.global_step == self._first + 1:
            # The first step is no measure of the others: it pays for what is made once.
            self._begun = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Print the line, above the bar where there is one."""
        line = console_line(logs or {})
        if line is None or not state.is_world_process_zero:
            return
        line = f"step {state.global_step}/{state.max_steps}  {line}"
        if self.training_bar is not None:
            self.training_bar.write(line)
            return
        done, left = state.global_step - self._first - 1, state.max_steps - state.global_step
        if "loss" in (logs or {}) and done > 0 and left > 0:
            line += f", {duration((time.perf_counter() - self._begun) / done * left)} left"
        print(line, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)


# -- what came of it ---------------------------------------------------------------------------------------------------


def next_command(args: argparse.Namespace) -> list[str]:
    """The command that evaluates the run of ``args``; on ``TEST.jsonl`` where no file was held out."""
    folder = args.output_dir
    command = ["stepjepa", "evaluate", "--model_path", folder]
    command += ["--test_file", args.eval_file or "TEST.jsonl", "--output_file", str(Path(folder) / "test.jsonl")]
    # Flags that ``evaluate`` has too, where they were given.
    same = {"eval_max_new_tokens": 256, "eval_task": "auto", "spider_path": None, "missing_databases": "error"}
    for name, default in same.items():
        if getattr(args, name) != default:
            command += [f"--{name.removeprefix('eval_')}", str(getattr(args, name))]
    switches = ("trust_remote_code", "load_in_4bit", "load_in_8bit")
    return command + [f"--{name}" for name in switches if getattr(args, name)]


def last_lines(folder: Path, record: Mapping[str, Any]) -> list[Row]:
    """The rows to print after the last step, of a run folder and its ``run.json``."""
    results = record["results"]
    losses = [("LM loss", results["last_log"].get("lm_loss")), ("held out", results.get("eval_lm_loss"))]
    told = ", ".join(f"{name} {value:.4f}" for name, value in losses if value is not None)
    steps = f"{results['steps']:,} step{'' if results['steps'] == 1 else 's'}"
    taken = f"{steps}, {results['tokens']:,.0f} tokens in {duration(results['train_seconds'])}"
    held = [RUN_FILE, METRICS_FILE]
    if count := len(checkpoints(folder)):
        held.append(f"{count} checkpoint{'' if count == 1 else 's'}")
    return [
        ("done", f"{taken}{f'; {told}' if told else ''}"),
        ("run folder", f"{folder} (the model, {', '.join(held)})"),
    ]


def finished_json(args: argparse.Namespace, record: Mapping[str, Any]) -> dict[str, Any]:
    """The same for programs: run folder, parts of ``run.json``, and ``next``, the command that evaluates the run."""
    same = ("status", "model", "jepa", "encoding", "parameters", "counts", "eval_counts", "results")
    told = {name: record.get(name) for name in same}
    return {"run_folder": str(args.output_dir), **told, "next": next_command(args)}
