"""The first screen of a run: model, objective, data and steps, printed before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from stepjepa.base.counting import counted
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
from stepjepa.running.precision import describe_precision
from stepjepa.training.interface import TrainerInterface
from stepjepa.training.plan import EqualCompute, Plan

COSINE_COLLAPSES = (
    "cosine maps all texts to one direction in most runs, `jepa_loss_type infonce` does not (docs/how-to/collapse.md)"
)


def collapses(config: JepaConfig) -> bool:
    """Return whether an objective has the cosine without a term against its collapse."""
    return config.uses_views and config.jepa_loss_type == "cosine" and not (config.sigreg or config.variance)


def adapter_rate(run: RunConfig) -> str | None:
    """Return a note on an adapter that is trained at the default learning rate, which suits full fine-tuning."""
    if run.lora is None or run.learning_rate != RunConfig.learning_rate:
        return None
    return f"{run.learning_rate:g} is the rate of full fine-tuning; adapters mostly want `learning_rate 2e-4`"


def random_weights_rate(run: RunConfig) -> str | None:
    """Return a note on random weights that are trained at the default learning rate, at which they hardly move."""
    random = run.pretrain or str(run.model_name).startswith("preset:")
    if not random or run.learning_rate != RunConfig.learning_rate:
        return None
    return f"{run.learning_rate:g} is the rate of trained weights; random ones mostly want `learning_rate 2e-3`"


class _Planned(TrainerInterface, Protocol):
    """The attributes of a ``JepaTrainer`` that the first screen shows, beyond those for callbacks."""

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
    prepared = trainer.prepared
    assert prepared is not None
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
        "precision": describe_precision(run, training, hidden_size(trainer.model)),
        "objective": _words(objective),
        "loss": COSINE_COLLAPSES if collapses(config) else None,
        "adapter": adapter_rate(run),
        "random weights": random_weights_rate(run),
        "router loss": describe_router(config, trainer.model),
        "frozen": describe_unreached(trainer.model),
        "encoding": f"{trainer.encoding} ({trainer.encoding_reason})" if config.uses_views else None,
        "LM head": LMHead(trainer.model).describe(),
        "data": f"{Path(trainer.source).name}: {describe_counts(prepared.counts)}",
        "pairs": prepared.template.get(WITHOUT_PAIR),
        "not used": prepared.template.get(NOT_USED),
        "chat template": describe_template(prepared.template),
        "turns": describe_turns(prepared, shares=trainer.encoding == "tree"),
        "example": trained_text(prepared.dataset[0].record, trainer.processing_class),
        "held out": describe_held_out(trainer.held_out),
        "each step": f"{counted(plan.records_per_step, 'record')} ({plan.batch_size} a batch x {accumulated} "
        f"accumulated x {counted(training.world_size, 'process')}), learning rate {training.learning_rate:g}, "
        f"seed {training.seed}",
        "groups": describe_groups(plan),
        "steps": f"{steps:,}, {steps / epoch:.3g} epochs of {counted(epoch, 'step')}",
        "same FLOPs": None if equal is None else equal.describe(),
        "output": run.output_dir,
        **further_rows,
    }
    return [(name, text) for name, text in rows.items() if text is not None]


def describe_groups(plan: Plan) -> str | None:
    """Describe the groups of records that are drawn together, and the share of tokens saved; None without groups."""
    if plan.sampler.groups is None:
        return None
    groups, records = len(set(plan.sampler.groups.tolist())), len(plan.records)
    sizes = f"{counted(records, 'record')} in {counted(groups, 'group')} by prompt"
    return f"{sizes}, which saves {plan.saved_by_groups():.1%} of the tokens"


def describe_template(facts: Mapping[str, str]) -> str:
    """Describe the tokens that end a turn, and the additions to the saved chat template."""
    expected = {"system role": "yes", "date": "none", "answer begins with": None}
    unusual = {name: facts[name] for name, text in expected.items() if facts.get(name, text) != text}
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


def describe_held_out(sets: Mapping[str, Prepared]) -> str | None:
    """Describe the counts of each set of held-out records; None if there is none."""
    described = [" ".join(filter(None, (name, describe_counts(prepared.counts)))) for name, prepared in sets.items()]
    return "; ".join(described) or None


def describe_counts(counts: Mapping[str, int]) -> str:
    """Describe the counts of prepared records, without those that are zero."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count or name == "records")


def _words(part: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in part.items())
