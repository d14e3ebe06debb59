"""What a training run prints before its first step and after its last one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepjepa.compute.equal_compute import EqualCompute
from stepjepa.config import JepaConfig
from stepjepa.models.architecture import base_model
from stepjepa.models.weights import parameter_counts, quantized
from stepjepa.run_folder import METRICS_FILE, RUN_FILE, checkpoints
from stepjepa.terminal import duration
from stepjepa.training.plot import PLOT_FILE

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from stepjepa.batch.dataset import Prepared
    from stepjepa.training.trainer import JepaTrainer

Row = tuple[str, str]


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
        told: rows ``columns``, ``prompts`` and ``answers``, where there is something to say.
        equal: of a run that is as long as its compute allows.
        checkpoint: that the run is resumed from.
    """
    config, prepared = trainer.jepa, trainer.prepared
    rows: list[tuple[str, str | None]] = [
        ("model", _model(args, trainer)),
        ("objective", _objective(config)),
        ("loss", args.why_loss),
        ("encoding", f"{trainer.encoding} ({trainer.encoding_reason})" if config.uses_views else None),
        ("data", f"{Path(prepared.source).name}: {_counts(prepared, config)}" if prepared else None),
        ("columns", told.get("columns")),
        ("held out", _counts(trainer.prepared_eval, config) if trainer.prepared_eval is not None else None),
        ("answers", told.get("answers")),
        ("each step", _step(trainer.args)),
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


def _step(args: TrainingArguments) -> str:
    batch, accumulated, processes = args.train_batch_size, args.gradient_accumulation_steps, args.world_size
    records = batch * accumulated * processes
    return (
        f"{records} records ({batch} a batch x {accumulated} accumulated x {processes} process{'es' * (processes > 1)})"
    )


def _steps(trainer: JepaTrainer, equal: EqualCompute | None) -> str:
    args = trainer.args
    length = f"{args.max_steps:,}"
    if equal is not None:
        length = f"same FLOPs as {args.num_train_epochs:g} regular epochs: {equal.describe()}"
    elif trainer.prepared is not None:
        epoch = trainer.plan.steps_per_epoch
        total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
        length = f"{total:,}, {total / epoch:.3g} epochs of {epoch:,}"
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return f"{length}; learning rate {args.learning_rate:g} ({schedule}); seed {args.seed}"


def next_command(args: argparse.Namespace) -> list[str]:
    """The command that evaluates the run of ``args``; on ``TEST.jsonl`` where no file was held out."""
    folder = args.output_dir
    command = ["stepjepa", "evaluate", "--model_path", folder]
    command += ["--test_file", args.eval_file or "TEST.jsonl", "--output_file", str(Path(folder) / "test.jsonl")]
    if args.columns:
        command += ["--columns", *args.columns]
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
    held = [RUN_FILE, *(name for name in (METRICS_FILE, PLOT_FILE) if (folder / name).is_file())]
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
