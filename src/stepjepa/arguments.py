"""Flags shared by several commands, and the :class:`JepaConfig` built from them. Free of torch."""

# ruff: noqa: RUF009  # option() makes the field

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from stepjepa.config import CHOICES, DEFAULTS, NEEDS_VIEWS, SETTINGS, JepaConfig, layouts_of
from stepjepa.errors import UserError, shown
from stepjepa.options import add_options, from_args, option, options_of, refuse_without_effect

OBJECTIVE = "objective (neither --regular nor --step_jepa means LLM-JEPA)"

SHORT_LOSSES = {"jepa_l2": "l2", "jepa_mse": "mse", "infonce": "infonce"}

DATA = ("max_length", "over_length")
"""Fields of :class:`JepaConfig` whose flags are listed with ``--train_file``."""

LOSSES = tuple(name for name, about in SETTINGS.items() if about["affects"] == "objective")
"""Fields of :class:`JepaConfig` that only change what is computed from the embeddings and the logits."""

PUBLISHED_WITH_REGULAR = ("predictors", "last_token", "lbd", "step_separator")
"""Flags that published scripts also pass for their baseline (at least the first three): noted, not refused."""


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, as in ``--term_args '{"weight": 0.1}'``."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {shown(text)} ({error})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object in braces, got {shown(text)}")
    return found


class _LayoutNames(tuple[str, ...]):
    """Choices of ``--layout``: the registered names, and any ``module:function``, which is loaded later."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or ":" in str(name)


@dataclass
class DataFlags:
    """Flags of the training records."""

    train_file: str | None = option(
        None,
        "JSON lines, JSON, CSV, TSV or Parquet; with 'messages', or columns such as question and answer",
        metavar="FILE",
    )
    columns: list[str] | None = option(
        None, "columns of the user's and the assistant's text; if they are not the usual ones", metavar="NAME"
    )
    bad_records: Literal["error", "skip"] = option(
        "error", "lines that are not valid records; skip: leave them out, and say how many"
    )


@dataclass
class ModelFlags:
    """Flags of the model."""

    model_name: str | None = option(None, "folder, hub id, or preset:tiny, preset:small ...", metavar="NAME")
    gguf_file: str | None = option(
        None, "GGUF file of --model_name to dequantise; needs the package gguf", metavar="FILE"
    )
    chat_template: str | None = option(None, "Jinja file instead of the tokenizer's own template", metavar="FILE")
    trust_remote_code: bool = option(False, "run code that comes with the model")


@dataclass
class ModeFlags:
    """Short flags for fields of :class:`JepaConfig`, and ``--additive_mask``, which has no effect."""

    regular: bool = option(False, "plain fine-tuning: the LM loss alone")
    step_jepa: bool = option(False, "each reasoning step predicts the next")
    train_all: bool = option(False, "short for --labels all", names=("trainall",))
    additive_mask: bool = option(False, "no effect; all views run in one pass without it")


@dataclass
class LossFlags:
    """Short flags for the alignment loss, and flags of user-defined terms."""

    jepa_l2: bool = option(False, "short for --jepa_loss_type l2")
    jepa_mse: bool = option(False, "short for --jepa_loss_type mse")
    infonce: bool = option(False, "short for --jepa_loss_type infonce")
    term: list[str] | None = option(None, "terms of your own (docs/design.md)", metavar="module:Class")
    term_args: list[Any] | None = option(
        None, "settings of each --term, in their order: '{\"weight\": 0.1}'", metavar="JSON", parse=json_object
    )


def add_training_data(
    parser: argparse.ArgumentParser, model: type = ModelFlags, *, required: Collection[str] = ()
) -> None:
    """Add the flags of records, model and objective, which train, inspect and verify share.

    Args:
        parser: the parser to extend.
        model: dataclass of the model's flags, :class:`ModelFlags` or derived from it.
        required: names of the flags that are required.
    """
    add_options(parser, DataFlags, "data", only=("train_file",), required=required)
    add_options(parser, JepaConfig, "data", only=DATA)
    add_options(parser, DataFlags, "data", only=("columns", "bad_records"))
    add_options(parser, model, "model", required=required)
    add_options(parser, ModeFlags, OBJECTIVE, only=("regular", "step_jepa"))
    add_options(parser, JepaConfig, OBJECTIVE, without=("mode", *DATA, *LOSSES))
    add_options(parser, ModeFlags, OBJECTIVE, only=("train_all", "additive_mask"))
    add_options(parser, JepaConfig, "loss", only=LOSSES, without=("terms",))
    add_options(parser, LossFlags, "loss")
    layout = parser._option_string_actions["--layout"]
    layout.choices, layout.metavar = _LayoutNames(layouts_of(*CHOICES["mode"])), None
    # No defaults, so that a flag that is given beside its short form is noticed.
    parser.set_defaults(labels=None, jepa_loss_type=None, lbd=None, gamma=None, why_loss=None)


def objective_flags() -> set[str]:
    """The names of all flags that :func:`jepa_config` reads, except those in ``DATA``."""
    names = {each.name for kind in (JepaConfig, ModeFlags, LossFlags) for each, _ in options_of(kind)}
    return names - {"mode", "terms", *DATA}


def jepa_config(args: argparse.Namespace) -> JepaConfig:
    """Build the configuration that the shared flags describe.

    Raises:
        UserError: flags contradict each other or a value is out of range.
    """
    if args.regular and args.step_jepa:
        raise UserError("--regular and --step_jepa exclude each other; leave one out (neither means LLM-JEPA)")
    losses = [name for flag, name in SHORT_LOSSES.items() if getattr(args, flag)]
    losses += [args.jepa_loss_type] if args.jepa_loss_type is not None else []
    if len(set(losses)) > 1:
        raise UserError(f"more than one alignment loss is named ({', '.join(losses)}); leave one")
    if args.train_all and args.labels not in (None, "all"):
        raise UserError(f"--train_all means --labels all, and --labels {args.labels} is named too; leave one out")
    if args.regular:
        _refuse_views(args, losses)
    elif args.step_jepa and args.last_token not in (None, -1):
        _note(f"--last_token {args.last_token} is followed here; the published Step-JEPA script leaves it unused")
    if args.additive_mask:
        _note("--additive_mask changes nothing: all views are run in one pass anyway")
    loss, args.why_loss = (losses[0], None) if losses else _default_loss(args)
    resolved = {
        "mode": "regular" if args.regular else "step-jepa" if args.step_jepa else "llm-jepa",
        "jepa_loss_type": loss,
        "lbd": DEFAULTS["lbd"] if args.lbd is None else args.lbd,
        "gamma": DEFAULTS["gamma"] if args.gamma is None else args.gamma,
        "labels": "all" if args.train_all else args.labels or DEFAULTS["labels"],
        # On the command line, \n stands for a line end.
        "step_separator": args.step_separator.replace("\\n", "\n"),
        "terms": _terms(args),
    }
    refuse_without_effect({**vars(args), **resolved}, JepaConfig)
    try:
        return from_args(JepaConfig, args, **resolved)
    except ValueError as error:
        raise UserError(f"--{error}" if str(error).split(":")[0].isidentifier() else str(error)) from None


def _default_loss(args: argparse.Namespace) -> tuple[str, str | None]:
    """The alignment loss if no flag names one, and a note on it for the first screen.

    InfoNCE, unless ``--term``, ``--predictors``, ``--last_token`` or a flag of ``LOSSES`` is set: published command
    lines name no loss but set such flags, and mean the papers' cosine, which mostly collapses to one direction
    (docs/how-to/collapse.md).
    """
    usual = {**DEFAULTS, **dict.fromkeys(("jepa_loss_type", "lbd", "gamma"))}
    named = [name for name in (*LOSSES, "predictors", "last_token") if getattr(args, name, usual[name]) != usual[name]]
    if args.regular:
        return str(DEFAULTS["jepa_loss_type"]), None
    if not named and not args.term:
        return "infonce", "InfoNCE, the default, which does not collapse; --preset paper, or a named loss, for others"
    if {"sigreg", "variance"} & {*named}:
        return "cosine", None
    return "cosine", "cosine, the papers', since none is named; it mostly collapses, --jepa_loss_type infonce does not"


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _terms(args: argparse.Namespace) -> tuple[dict[str, Any], ...]:
    """``--term`` and ``--term_args`` in the form of ``JepaConfig.terms``."""
    names, settings = args.term or [], args.term_args or []
    if settings and len(settings) != len(names):
        raise UserError(
            f"--term_args: expected a JSON object for each --term, in their order ({{}} for none), got {len(settings)} "
            f"for {len(names)}"
        )
    return tuple({"term": name, "args": own} for name, own in zip(names, settings or [{} for _ in names], strict=True))


def _refuse_views(args: argparse.Namespace, losses: list[str]) -> None:
    """Refuse flags of views in regular training; note and reset those in ``PUBLISHED_WITH_REGULAR``."""
    named = [name for name in NEEDS_VIEWS if getattr(args, name) not in (None, DEFAULTS[name])]
    unused = [f"--{name}" for name in named if name not in (*PUBLISHED_WITH_REGULAR, "jepa_loss_type")]
    if unused or losses:
        what = unused[0] if unused else f"the alignment loss '{losses[0]}'"
        raise UserError(f"--regular has no views, so {what} does nothing with it; leave one out")
    idle = [name for name in PUBLISHED_WITH_REGULAR if name in named]
    if idle:
        _note(f"--regular has no views, so {', '.join(f'--{name}' for name in idle)} have no effect")
        for name in idle:
            setattr(args, name, DEFAULTS[name])
