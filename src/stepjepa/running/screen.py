"""The output of a run: the first screen, the last lines, the plot."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stepjepa.base.files import atomic_write, read_jsonl
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import PALETTE, duration, print_rows
from stepjepa.base.typed_json import to_json
from stepjepa.batch.collate import Encoding
from stepjepa.batch.dataset import Prepared
from stepjepa.batch.tokenize import WITHOUT_PAIR
from stepjepa.batch.trained_text import trained_text
from stepjepa.chat.unused import NOT_USED
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.run import RunConfig
from stepjepa.models.architecture import base_model, hidden_size
from stepjepa.models.lm_head import LMHead
from stepjepa.models.probe import describe_unreached
from stepjepa.models.weights import parameter_counts
from stepjepa.objectives.router import describe_router
from stepjepa.running.transformers import bf16_advice, bf16_by_default
from stepjepa.store.folder import METRICS_FILE, RUN_FILE
from stepjepa.store.record import Results, RunRecord
from stepjepa.training.interface import TrainerInterface
from stepjepa.training.plan import EqualCompute, Plan

if TYPE_CHECKING:
    from transformers import TrainingArguments

COSINE_COLLAPSES = (
    "cosine maps all texts to one direction in most runs, `jepa_loss_type infonce` does not (docs/how-to/collapse.md)"
)


def collapses(config: JepaConfig) -> bool:
    """Return whether an objective has the cosine without a term against its collapse."""
    return config.uses_views and config.jepa_loss_type == "cosine" and not (config.sigreg or config.variance)


def _precision(run: RunConfig, training: TrainingArguments, width: int) -> str | None:
    """Describe the precision of matrix products if the run names none, or a faster one; None for float32."""
    if training.bf16 and bf16_by_default(run):
        return "bfloat16 (autocast), the default on this device; `bf16 false` trains in float32"
    return bf16_advice(run, width, training.device.type)


def adapter_rate(run: RunConfig) -> str | None:
    """Return a note on an adapter that is trained at the default learning rate, which is full fine-tuning's."""
    if run.lora is None or run.learning_rate != RunConfig.learning_rate:
        return None
    return f"{run.learning_rate:g} is the rate of full fine-tuning; adapters mostly want `learning_rate 2e-4`"


class _Planned(TrainerInterface, Protocol):
    """Attributes of a ``JepaTrainer`` that the first screen shows, beside those that callbacks use."""

    jepa: JepaConfig
    plan: Plan
    encoding: Encoding
    encoding_reason: str


def first_screen(
    run: RunConfig, trainer: _Planned, equal: EqualCompute | None, further_rows: Mapping[str, str | None]
) -> list[tuple[str, str]]:
    """Return the rows to print before the first step.

    Args:
        run: the configuration.
        trainer: has read the data and planned the steps.
        equal: limits the run to equal FLOPs; None without.
        further_rows: rows that come after these; a row of None is left out.
    """
    config, training = trainer.jepa, trainer.args
    prepared, held_out = trainer.prepared, trainer.prepared_eval
    assert prepared is not None
    first = prepared.dataset[0]
    assert first is not None  # it is no padding
    trainable, total = parameter_counts(trainer.model)
    where = f"{type(base_model(trainer.model)).__name__}, {run.quantized or run.dtype} on {training.device.type}"
    defaults = JepaConfig(mode=config.mode).to_dict()
    main = ("mode", "layout", "predictors", "pairs", "jepa_loss_type", "lbd") if config.uses_views else ("mode",)
    objective = {name: value for name, value in config.to_dict().items() if name in main or value != defaults[name]}
    plan = trainer.plan
    epoch, accumulated = plan.steps_per_epoch, training.gradient_accumulation_steps
    steps = training.max_steps if training.max_steps > 0 else math.ceil(training.num_train_epochs * epoch)
    rows = {
        "model": f"{run.model_name} ({where}), {trainable:,} of {total:,} parameters trained",
        "precision": _precision(run, training, hidden_size(trainer.model)),
        "objective": _words(objective),
        "loss": COSINE_COLLAPSES if collapses(config) else None,
        "adapter": adapter_rate(run),
        "router loss": describe_router(config, trainer.model),
        "frozen": describe_unreached(trainer.model),
        "encoding": f"{trainer.encoding} ({trainer.encoding_reason})" if config.uses_views else None,
        "LM head": LMHead(trainer.model).describe(),
        "data": f"{Path(trainer.source).name}: {describe_counts(prepared.counts)}",
        "pairs": prepared.template.get(WITHOUT_PAIR),
        "not used": prepared.template.get(NOT_USED),
        "chat template": describe_template(prepared.template),
        "turns": describe_turns(prepared, shares=trainer.encoding == "tree"),
        "example": trained_text(first.record, trainer.processing_class),
        "held out": describe_counts(held_out.counts) if held_out is not None else None,
        "each step": f"{plan.records_per_step} records ({plan.batch_size} a batch x {accumulated} accumulated x "
        f"{training.world_size} processes), learning rate {training.learning_rate:g}, seed {training.seed}",
        "groups": describe_groups(plan),
        "steps": f"{steps:,}, {steps / epoch:.3g} epochs of {epoch:,} steps",
        "same FLOPs": None if equal is None else equal.describe(),
        "output": run.output_dir,
        **further_rows,
    }
    return [(name, text) for name, text in rows.items() if text is not None]


def describe_groups(plan: Plan) -> str | None:
    """Describe groups of records that are drawn together and the tokens that this saves; None without groups."""
    if plan.sampler.groups is None:
        return None
    groups, records = len(set(plan.sampler.groups.tolist())), len(plan.records)
    return f"{records:,} records in {groups:,} groups by prompt, which saves {plan.saved_by_groups():.1%} of the tokens"


def describe_template(facts: Mapping[str, str]) -> str:
    """Describe the tokens that end a turn, and the additions to the chat template that is saved."""
    usual_facts = {"system role": "yes", "date": "none", "answer begins with": None}
    unusual = {name: facts[name] for name, usual in usual_facts.items() if facts.get(name, usual) != usual}
    return "; ".join(f"{name} {text}" for name, text in {"end of turn": facts["end of turn"], **unusual}.items())


def describe_turns(prepared: Prepared, *, shares: bool) -> str | None:
    """Describe the cost of training each turn behind its own prompt; None if every chat has one turn.

    Args:
        prepared: the data, as tokens.
        shares: whether the turns of a chat share their beginnings.
    """
    turns, records, tokens = prepared.counts["turns"], prepared.counts["records"], prepared.tokens
    if turns <= records:
        return None
    run = tokens["tree" if shares else "main"]
    return (
        f"{turns:,} of {records:,} chats, each behind the prompt that a server sends: {run:,} tokens, "
        f"{run / tokens['chat']:.2f} times those of one sequence per chat, {run / tokens['turns']:.0%} of those of one "
        "sequence per turn"
    )


def describe_counts(counts: Mapping[str, int]) -> str:
    """Describe the counts of prepared records, without those that are zero."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count or name == "records")


def _words(part: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in part.items())


def next_command(run: RunConfig) -> list[str]:
    """Return the command that evaluates a run on its held-out file; on ``TEST.jsonl`` where no file was held out.

    Answers to held-out records are not named as those to a test file, since settings are chosen on the former.
    """
    folder, file = str(run.output_dir), run.eval_file or "TEST.jsonl"
    command = ["stepjepa", "evaluate", "--model_path", folder, "--test_file", file]
    command += ["--output_file", str(Path(folder) / ("held-out.jsonl" if run.eval_file else "test.jsonl"))]
    # Settings that ``evaluate`` shares, where they differ from the default.
    same = {"eval_max_new_tokens": 256, "eval_task": "auto", "spider_path": None, "missing_databases": "error"}
    for name, default in same.items():
        if getattr(run, name) != default:
            command += [f"--{name.removeprefix('eval_')}", str(getattr(run, name))]
    command += ["--columns", *run.columns] if run.columns else []
    switches = ("trust_remote_code", "load_in_4bit", "load_in_8bit")
    return command + [f"--{name}" for name in switches if getattr(run, name)]


def last_lines(folder: Path, results: Results) -> list[tuple[str, str]]:
    """Return the rows to print after the last step: the ``results``, and what the run ``folder`` holds."""
    losses = [
        ("LM loss", results.last_log.get("lm_loss")),
        ("held-out LM loss", results.evaluation.get("eval_lm_loss")),
    ]
    shown_losses = [f"{name} {value:.4f}" for name, value in losses if value is not None]
    if results.best_step is not None:
        shown_losses.append(f"the model is the best checkpoint, of step {results.best_step:,}")
    steps = f"{results.steps:,} step{'s' * (results.steps != 1)}"
    cost = f"{steps}, {results.tokens or 0:,.0f} tokens in {duration(results.train_seconds or 0.0)}"
    # A run that logged nothing has no picture.
    files = ["the model", RUN_FILE, METRICS_FILE, *([PLOT_FILE] if (folder / PLOT_FILE).is_file() else [])]
    return [("done", "; ".join([cost, *shown_losses])), ("run folder", f"{folder} ({', '.join(files)})")]


def print_finished(run: RunConfig, record: RunRecord) -> None:
    """Print the outcome of a run, its folder and the next command; nothing for a run without results."""
    if record.results is None:
        return
    print_rows(last_lines(Path(str(run.output_dir)), record.results))
    # On a line of its own, so that it can be copied from a terminal of any width.
    chosen_on = "next, on the held-out records (settings are chosen on these, and reported on other test records)"
    label = chosen_on if run.eval_file else "next, with your test records in TEST.jsonl"
    print(f"{label}: {shlex.join(next_command(run))}", flush=True)


def finished_json(run: RunConfig, record: RunRecord) -> JsonObject:
    """Return the JSON output of a run: folder, parts of ``run.json``, and ``next``, the command that evaluates it."""
    same = ("status", "model", "jepa", "encoding", "parameters", "counts", "eval_counts", "results")
    parts = {name: to_json(getattr(record, name)) for name in same}
    return {"run_folder": str(run.output_dir), **parts, "next": next_command(run)}


PLOT_FILE = "metrics.png"

PANELS: dict[str, dict[str, str]] = {
    "LM loss": {"lm_loss": "training", "eval_lm_loss": "held out"},
    "alignment loss": {"jepa_loss": "training", "eval_jepa_loss": "held out"},
    "cosine of pairs": {"matched_similarity": "matched", "shuffled_similarity": "shuffled"},
    "effective rank": {"source_rank": "source", "target_rank": "target"},
}
"""Panels of the plot: title -> columns of ``metrics.jsonl`` with their labels."""


def draw_metrics(folder: Path) -> None:
    """Draw ``metrics.jsonl`` of a run folder as ``metrics.png``; panels without any value are skipped."""
    from matplotlib.figure import Figure

    lines = [line for _, line in read_jsonl(folder / METRICS_FILE)]
    curves = {
        name: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        for name in chain(*PANELS.values())
    }
    panels = [title for title, columns in PANELS.items() if any(map(curves.get, columns))]
    if not panels:
        return
    width, height = 3.6 * len(panels), 3.0
    figure = Figure(figsize=(width, height))
    # Margins in inches: a layout that measures all labels takes half of the time.
    figure.subplots_adjust(0.6 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.3 / height, wspace=0.27)
    for axes, title in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for colour, (name, label) in zip(PALETTE, PANELS[title].items(), strict=False):
            if curves[name]:
                axes.plot(*zip(*curves[name], strict=True), ".-", color=colour, label=label, markersize=4)
        axes.set(title=title, xlabel="step")
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.legend(loc="upper right")  # "best" may take seconds
    with atomic_write(folder / PLOT_FILE, "wb") as stream:
        figure.savefig(stream, format="png", dpi=120)
