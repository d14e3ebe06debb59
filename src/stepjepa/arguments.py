"""Flags shared by several commands, the :class:`JepaConfig` built from them, flags from YAML files. Free of torch."""

# ruff: noqa: RUF009  # option() makes the field

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from stepjepa.config import DEFAULTS, NEEDS_VIEWS, SETTINGS, JepaConfig
from stepjepa.errors import UserError, shown
from stepjepa.files import existing_file, read_text, read_yaml
from stepjepa.options import (
    READERS,
    Parser,
    as_arguments,
    from_args,
    option,
    options_of,
    refuse_both,
    refuse_without_effect,
)

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
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object in braces, got {shown(text)}")
    return found


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
        "error", "lines that are not valid records; skip: count and skip them"
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
class JsonFlags:
    """How results are printed."""

    json: bool = option(False, "one JSON document on standard output; lines go to standard error")


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


def add_training_data(parser: Parser, model: type = ModelFlags, *, required: Collection[str] = ()) -> None:
    """Add the flags of records, model and objective, which train, inspect and verify share.

    Args:
        parser: the parser to extend.
        model: dataclass of the model's flags, :class:`ModelFlags` or derived from it.
        required: names of the flags that are required.
    """
    parser.add(DataFlags, "data", only=("train_file",), required=required)
    parser.add(JepaConfig, "data", only=DATA)
    parser.add(DataFlags, "data", without=("train_file",))
    parser.add(model, "model", required=required)
    parser.add(ModeFlags, OBJECTIVE, only=("regular", "step_jepa"))
    parser.add(JepaConfig, OBJECTIVE, without=("mode", *DATA, *LOSSES))
    parser.add(ModeFlags, OBJECTIVE, only=("train_all", "additive_mask"))
    parser.add(JepaConfig, "loss", only=LOSSES, without=("terms",))
    parser.add(LossFlags, "loss")
    # No defaults, so that a flag that is given beside its short form is noticed.
    parser.set_defaults(labels=None, jepa_loss_type=None, lbd=None, gamma=None, why_loss=None)


def objective_flags() -> set[str]:
    """The names of all flags that :func:`jepa_config` reads, except those in ``DATA``."""
    names = {each.name for kind in (JepaConfig, ModeFlags, LossFlags) for each in options_of(kind)}
    return names - {"mode", "terms", *DATA}


def jepa_config(args: argparse.Namespace) -> JepaConfig:
    """Build the configuration that the shared flags describe.

    Raises:
        UserError: flags contradict each other or a value is out of range.
    """
    refuse_both(args, ("regular", "step_jepa"))
    losses = [name for flag, name in SHORT_LOSSES.items() if getattr(args, flag)]
    losses += [args.jepa_loss_type] if args.jepa_loss_type is not None else []
    if len(set(losses)) > 1:
        raise UserError(f"more than one alignment loss is named ({', '.join(losses)}); leave one")
    if args.train_all and args.labels not in (None, "all"):
        raise UserError(f"--train_all means --labels all, and --labels {args.labels} is named too; leave one out")
    if args.regular:
        _refuse_views(args, losses)
    elif args.step_jepa and args.last_token not in (None, -1):
        note(f"--last_token {args.last_token} is followed here; the published Step-JEPA script leaves it unused")
    if args.additive_mask:
        note("--additive_mask changes nothing: all views are run in one pass anyway")
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
        return "cosine", None
    if not named and not args.term:
        return "infonce", "InfoNCE, the default, which does not collapse; --preset paper, or a named loss, for others"
    if {"sigreg", "variance"} & {*named}:
        return "cosine", None
    return "cosine", "cosine, the papers', since none is named; it mostly collapses, --jepa_loss_type infonce does not"


def note(text: str) -> None:
    """Print a note on standard error."""
    print(f"note: {text}", file=sys.stderr)


def _terms(args: argparse.Namespace) -> tuple[dict[str, Any], ...]:
    """``--term`` and ``--term_args`` in the form of ``JepaConfig.terms``."""
    names, settings = args.term or [], args.term_args or []
    if settings and len(settings) != len(names):
        raise UserError(f"--term_args: expected a JSON object for each --term ({{}} for none), got {len(settings)}")
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
        note(f"--regular has no views, so {', '.join(f'--{name}' for name in idle)} have no effect")
        for name in idle:
            setattr(args, name, DEFAULTS[name])


OURS = ("do_train", "do_eval", "do_predict", "remove_unused_columns", "label_names")
"""Fields of TrainingArguments that are refused as flags, since they have no effect with this trainer."""

_MOST_VALUES = 10_000
"""Most values in a dict of a YAML file: with YAML aliases a few lines can expand to billions of values."""


def arguments_of_file(parser: Parser, path: str, given: Sequence[str]) -> list[str]:
    """Read a YAML file of flags as arguments, without those that the command line ``given`` has, too.

    Raises:
        UserError: the file is missing, not YAML, or not a mapping of flags; or a flag is unknown, repeated or has a
            wrong value, which is named with its line.
    """
    file = existing_file(path, "configuration file")
    values = read_yaml(file)
    if not isinstance(values, dict | None):
        raise UserError(f"holds a {type(values).__name__}; expected 'flag: value' lines", path=file)
    lines = [line.lstrip(" \t{,'\"?") for line in read_text(file).splitlines()]
    known = parser._option_string_actions
    overridden = {known[flag].dest for flag in (each.partition("=")[0] for each in given) if flag in known}
    result, seen = list[str](), set[str]()
    for key, value in (values or {}).items():
        name = str(key).replace("-", "_")
        line = next((number for number, text in enumerate(lines, start=1) if text.startswith(str(key))), None)
        try:
            if name == "config" or not re.fullmatch(r"[A-Za-z]\w*", name):
                raise UserError(f"unknown key {shown(str(key))}; 'stepjepa train --help_all' names all")
            if name in seen:
                raise UserError(f"the key {shown(str(key))} stands twice; leave one")
            _check_value(name, value)
            words = as_arguments({name: value})
            named_training_fields(parser, parser.parse_known_args(words)[1])
        except UserError as error:
            raise UserError(str(error), path=file, line=line) from None
        seen.add(name)
        action = known.get(f"--{name}")
        if action is None or action.dest not in overridden:
            result += words
    return result


def _check_value(name: str, value: Any) -> None:
    """Refuse what YAML can hold and a flag can't."""
    inside = list(value) if isinstance(value, list) else []
    if wrong := [type(each).__name__ for each in inside if each is None or isinstance(each, list | dict)]:
        raise UserError(f"{name}: holds a {wrong[0]} in a list; expected words or numbers")
    for count, each in enumerate(_values_in(value)):
        if count > _MOST_VALUES:
            raise UserError(f"{name}: holds more than {_MOST_VALUES:,} values; expected a few")
        if isinstance(value, dict) and not (each is None or isinstance(each, str | int | float)):
            raise UserError(f"{name}: holds a {type(each).__name__}; put it in quotes")


def _values_in(value: Any) -> Iterator[Any]:
    """The values inside objects and lists, without end if one holds itself."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting.extend([*each, *each.values()] if isinstance(each, dict) else each)
            each = None
        yield each


def training_parser() -> Any:
    """A parser of all fields of ``transformers.TrainingArguments``."""
    from transformers import HfArgumentParser, TrainingArguments

    return HfArgumentParser(TrainingArguments, add_help=False, allow_abbrev=False, argument_default=None)


def training_fields() -> list[str]:
    """The fields of ``transformers.TrainingArguments`` that are flags."""
    return [name for name in dict.fromkeys(each.dest for each in training_parser()._actions) if name not in OURS]


@cache
def _named_fields_parser() -> Any:
    """A parser of the fields of TrainingArguments that returns only those that were named, not their defaults."""
    inner = training_parser()
    for action in inner._actions:
        action.default = argparse.SUPPRESS
        action.type = READERS.get(action.type, action.type)
        if action.dest == "report_to":
            # transformers' own parser takes only one name.
            action.nargs = "+"
    return inner


def named_training_fields(parser: Parser, rest: Sequence[str]) -> dict[str, Any]:
    """The fields of TrainingArguments among the arguments that our parser does not know; others are refused."""
    if not rest:
        return {}
    inner = _named_fields_parser()
    inner.error = parser.error
    known, unknown = inner.parse_known_args(rest)
    if unknown:
        parser.refuse(unknown, [f"--{name}" for name in training_fields()])
    named = vars(known)
    if len(named.get("report_to", ())) == 1:
        named["report_to"] = named["report_to"][0]
    if "hub_token" in named:
        # Every user of the machine can read a command line, and the run folder keeps it.
        parser.error("--hub_token would be read by others; leave it out and set HF_TOKEN in the environment")
    if idle := [name for name in named if name in OURS]:
        parser.error(f"--{idle[0]} has no effect here; leave it out")
    return named
