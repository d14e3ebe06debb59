"""The records of a run, and what it tells of itself: ``run.json``, the first screen, the last lines, its plot."""

import argparse
import hashlib
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write, fingerprint, read_jsonl
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import PALETTE, duration
from stepjepa.base.typed_json import to_json
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.option import without_flags
from stepjepa.data.records import BadRecords, Record, tell_unused
from stepjepa.data.sources import mix, read_any, read_records
from stepjepa.models.architecture import base_model
from stepjepa.models.weights import parameter_counts, quantized
from stepjepa.objectives.router import describe_router
from stepjepa.store.fingerprint import model_fingerprint
from stepjepa.store.folder import METRICS_FILE, RUN_FILE
from stepjepa.store.record import Order, Results, RunRecord, Source, Training, machine, versions
from stepjepa.training.plan import EqualCompute

# -- reading -----------------------------------------------------------------------------------------------------------


def read_data(args: argparse.Namespace) -> tuple[list[Record], list[Record], dict[str, Source]]:
    """Training records, held-out records and what identifies their files."""
    if args.data_file is not None:
        records, about = _read(args, args.data_file)
        order = random.Random(args.split_seed).sample(range(len(records)), len(records))
        count = round(len(records) * args.eval_split)
        if not 0 < count < len(records):
            told = f"{len(records)} records can't be split with --eval_split {args.eval_split}; one part would be empty"
            raise UserError(told, path=args.data_file)
        train_records = [records[index] for index in sorted(order[count:])]
        eval_records = [records[index] for index in sorted(order[:count])]
        files = {"data": replace(about, eval_split=args.eval_split, split_seed=args.split_seed)}
    else:
        train_records, about = read_mixture(args) if args.dataset is not None else _read(args, args.train_file)
        eval_records, files = [], {"train": about}
        if args.eval_file is not None:
            eval_records, files["eval"] = _read(args, args.eval_file)
    _tell_overlap(train_records, eval_records)
    return train_records, eval_records, files


def read_mixture(args: argparse.Namespace) -> tuple[list[Record], Source]:
    """The records of ``--dataset``, and what identifies them."""
    parts, sources = zip(*(_read(args, source, read_any) for source in args.dataset), strict=True)
    taken = mix(list(parts), args.dataset_weights, args.split_seed)
    records = [record for part in taken for record in part]
    digest = hashlib.sha256(repr([(record.chat, record.views) for record in records]).encode())
    shares = [{**to_json(source), "taken": len(some)} for source, some in zip(sources, taken, strict=True)]
    names = " + ".join(str(source.file) for source in sources)
    more = {"datasets": shares}
    return records, Source(file=names, records=len(records), sha256=digest.hexdigest(), other=more)
    digest = hashlib.sha256(repr([(record.messages, record.views) for record in records]).encode())
    shares = [{**to_json(source), "taken": len(some)} for source, some in zip(sources, taken, strict=True)]
    names = " + ".join(str(source.file) for source in sources)
    more = {"datasets": shares}
    return records, Source(file=names, records=len(records), sha256=digest.hexdigest(), other=more)


def _read(
    args: argparse.Namespace, source: str, read: Callable[..., list[Record]] = read_records
) -> tuple[list[Record], Source]:
    bad = BadRecords(args.bad_records)
    records = read(source, bad=bad, columns=args.columns)
    if is_main_process():
        bad.tell()
        tell_unused(records)
    return records, Source(
        file=Path(source).name if Path(source).exists() else source,
        records=len(records),
        sha256=fingerprint(source) if read is read_records else None,
        other={"bad_records": bad.to_dict()} if bad.count else {},
    )


def _tell_overlap(train_records: list[Record], eval_records: list[Record]) -> None:
    """Say on standard error how many held-out records are trained on, too."""
    trained = {str(record.chat) for record in train_records}
    both = sum(str(record.chat) in trained for record in eval_records)
    if both and is_main_process():
        print(
            f"note: {both:,} of {len(eval_records):,} held-out records are among the training records, too, so what is "
            "measured on them is no measure of new ones; take them out of one",
            file=sys.stderr,
        )


# -- run.json ----------------------------------------------------------------------------------------------------------

OF_ONE_START = ("config", "resume_from_checkpoint", "output_dir", "json", "offline")
"""Flags that say where and how a run was started, not what it is."""


def describe_run(args: argparse.Namespace, trainer: Any) -> RunRecord:
    """The record of a run that begins, whose ``JepaTrainer`` exists.

    ``command`` is as it was typed; ``arguments`` the same with the configuration file written out and without
    :data:`OF_ONE_START`; relative paths are meant from ``directory``. ``model_fingerprint`` is a hash of a folder, the
    commit of a hub id, None for a preset.
    """
    trainable, total = parameter_counts(trainer.model)
    name, training, prepared = args.model_name, trainer.args, trainer.prepared
    tokens = {**prepared.tokens, "ratio": prepared.tokens["all"] / prepared.tokens["main"]}
    commit = getattr(trainer.model.config, "_commit_hash", None)
    return RunRecord(
        status="running",
        command=["train", *args.given],
        arguments=without_flags(args.resolved, OF_ONE_START),
        directory=str(Path.cwd()),
        model=name,
        model_fingerprint=model_fingerprint(name) if Path(name).is_dir() else commit,
        machine=machine(use_cpu=bool(args.training.get("use_cpu"))),
        versions=versions(),
        jepa=trainer.jepa.to_dict(),
        loaded={
            "dtype": args.dtype,
            "pretrain": args.pretrain,
            "train_tokenizer": None,  # of earlier versions
            "quantized": quantized(args),
            "chat_template": None if args.chat_template is None else fingerprint(args.chat_template),
            "attn_implementation": args.attn_implementation,
        },
        encoding={"used": trainer.encoding, "because": trainer.encoding_reason},
        training=Training.of(training),
        order=Order(
            seed=training.seed,
            data_seed=training.data_seed,
            records_per_micro_step=training.per_device_train_batch_size * training.world_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            train_sampling_strategy=str(training.train_sampling_strategy),
        ),
        counts=prepared.counts,
        tokens=tokens,
        template=prepared.template,
        eval_counts=trainer.prepared_eval.counts if trainer.prepared_eval else None,
        parameters={"trained": trainable, "total": total},
    )


# -- what is printed ---------------------------------------------------------------------------------------------------


def first_screen(
    args: argparse.Namespace, trainer: Any, equal: EqualCompute | None, told: Mapping[str, str | None]
) -> list[tuple[str, str]]:
    """The rows to print before the first step of a ``JepaTrainer``; ``told`` are rows of other origin."""
    config, held_out, training = trainer.jepa, trainer.prepared_eval, trainer.args
    trainable, total = parameter_counts(trainer.model)
    where = f"{type(base_model(trainer.model)).__name__}, {quantized(args) or args.dtype} on {training.device.type}"
    defaults = JepaConfig(mode=config.mode).to_dict()
    main = ("mode", "layout", "predictors", "pairs", "jepa_loss_type", "lbd") if config.uses_views else ("mode",)
    objective = {name: value for name, value in config.to_dict().items() if name in main or value != defaults[name]}
    plan = trainer.plan
    epoch, accumulated = plan.steps_per_epoch, training.gradient_accumulation_steps
    steps = training.max_steps if training.max_steps > 0 else math.ceil(training.num_train_epochs * epoch)
    rows = {
        "model": f"{args.model_name} ({where}), {trainable:,} of {total:,} parameters trained",
        "objective": _words(objective),
        "loss": args.why_loss,
        "router loss": describe_router(config, trainer.model),
        "encoding": f"{trainer.encoding} ({trainer.encoding_reason})" if config.uses_views else None,
        "data": f"{Path(trainer.source).name}: {_words(trainer.prepared.counts)}",
        "held out": _words(held_out.counts) if held_out is not None else None,
        "each step": f"{plan.records_per_step} records ({plan.batch_size} a batch x {accumulated} accumulated x "
        f"{training.world_size} processes), learning rate {training.learning_rate:g}, seed {training.seed}",
        "steps": f"{steps:,}, {steps / epoch:.3g} epochs of {epoch:,}",
        "same FLOPs": equal and equal.describe(),
        "output": args.output_dir,
        **told,
    }
    return [(name, text) for name, text in rows.items() if text is not None]


def _words(part: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in part.items())


def next_command(args: argparse.Namespace) -> list[str]:
    """The command that evaluates the run of ``args``; on ``TEST.jsonl`` where no file was held out."""
    output = str(Path(args.output_dir) / "test.jsonl")
    command = ["stepjepa", "evaluate", "--model_path", args.output_dir]
    command += ["--test_file", args.eval_file or "TEST.jsonl", "--output_file", output]
    # Flags that ``evaluate`` has too, where they were given.
    same = {"eval_max_new_tokens": 256, "eval_task": "auto", "spider_path": None, "missing_databases": "error"}
    for name, default in same.items():
        if getattr(args, name) != default:
            command += [f"--{name.removeprefix('eval_')}", str(getattr(args, name))]
    command += ["--columns", *args.columns] if args.columns else []
    switches = ("trust_remote_code", "load_in_4bit", "load_in_8bit")
    return command + [f"--{name}" for name in switches if getattr(args, name)]


def last_lines(folder: Path, results: Results) -> list[tuple[str, str]]:
    """The rows to print after the last step."""
    losses = [("LM loss", results.last_log.get("lm_loss")), ("held out", results.evaluation.get("eval_lm_loss"))]
    told = [f"{name} {value:.4f}" for name, value in losses if value is not None]
    steps = f"{results.steps:,} step{'s' * (results.steps != 1)}"
    taken = f"{steps}, {results.tokens or 0:,.0f} tokens in {duration(results.train_seconds or 0.0)}"
    files = f"the model, {RUN_FILE}, {METRICS_FILE}, {PLOT_FILE}"
    return [("done", "; ".join([taken, *told])), ("run folder", f"{folder} ({files})")]


def finished_json(args: argparse.Namespace, record: RunRecord) -> dict[str, Any]:
    """The same for programs: run folder, parts of ``run.json``, and ``next``, the command that evaluates the run."""
    same = ("status", "model", "jepa", "encoding", "parameters", "counts", "eval_counts", "results")
    told = {name: to_json(getattr(record, name)) for name in same}
    return {"run_folder": str(args.output_dir), **told, "next": next_command(args)}


PLOT_FILE = "metrics.png"

PANELS: dict[str, dict[str, str]] = {
    "LM loss": {"lm_loss": "training", "eval_lm_loss": "held out"},
    "alignment loss": {"jepa_loss": "training", "eval_jepa_loss": "held out"},
    "cosine of pairs": {"matched_similarity": "matched", "shuffled_similarity": "shuffled"},
    "effective rank": {"source_rank": "source", "target_rank": "target"},
}
"""What each panel of the plot shows: columns of ``metrics.jsonl`` with their labels."""


def draw_metrics(folder: Path) -> None:
    """Draw ``metrics.jsonl`` of a run folder as ``metrics.png``; panels without any value are skipped."""
    from matplotlib.figure import Figure

    lines = [line for _, line in read_jsonl(folder / METRICS_FILE)]
    curves = {
        name: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        for name in chain(*PANELS.values())
    }
    shown = [title for title, columns in PANELS.items() if any(map(curves.get, columns))]
    if not shown:
        return
    figure = Figure(figsize=(3.6 * len(shown), 3), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for colour, (name, label) in zip(PALETTE, PANELS[title].items(), strict=False):
            if curves[name]:
                axes.plot(*zip(*curves[name], strict=True), ".-", color=colour, label=label, markersize=4)
        axes.set(title=title, xlabel="step")
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.legend()
    with atomic_write(folder / PLOT_FILE, "wb") as stream:
        figure.savefig(stream, format="png", dpi=120)
