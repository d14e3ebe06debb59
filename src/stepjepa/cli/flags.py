"""Flags shared by several commands, the :class:`JepaConfig` built from them, flags from YAML files. Free of torch."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import existing_file, read_text, read_yaml
from stepjepa.cli.published import translate_train
from stepjepa.config.jepa import DEFAULTS, NEEDS_VIEWS, SETTINGS, JepaConfig
from stepjepa.config.option import (
    READERS,
    Parser,
    argument_type,
    as_arguments,
    from_args,
    option,
    refuse_both,
    refuse_without_effect,
)

OBJECTIVE = "objective (neither --regular nor --step_jepa means LLM-JEPA)"

UNSET = ("labels", "jepa_loss_type", "lbd", "gamma")
"""Fields of :class:`JepaConfig` whose flags have no default, so that it is known whether they are named."""

PAPERS_LOSS = ("predictors", "last_token", *(key for key, about in SETTINGS.items() if about["affects"] == "objective"))
"""Flags that make the papers' cosine the default loss."""

PUBLISHED_WITH_REGULAR = ("predictors", "last_token", "lbd", "step_separator")
"""Flags that published scripts also pass for their baseline (at least the first three): noted, not refused."""


@dataclass
class DataFlags:
    """Flags of the training records."""

    train_file: str | None = option(None, "JSON lines, JSON, CSV, TSV or Parquet; messages or columns", metavar="FILE")
    columns: list[str] | None = option(None, "columns of user and assistant; unless they are usual", metavar="NAME")
    bad_records: Literal["error", "skip"] = option("error", "lines that are no valid records; skip: count them")


@dataclass
class ModelFlags:
    """Flags of the model."""

    model_name: str | None = option(None, "folder, hub id, or preset:tiny, preset:small ...", metavar="NAME")
    chat_template: str | None = option(None, "Jinja file instead of the tokenizer's own template", metavar="FILE")
    trust_remote_code: bool = option(False, "run code that comes with the model")


@dataclass
class JsonFlags:
    """How results are printed."""

    json: bool = option(False, "one JSON document on standard output; lines go to standard error")


@dataclass
class ShortFlags:
    """Short flags for fields of :class:`JepaConfig`, and ``--additive_mask``, which has no effect."""

    regular: bool = option(False, "plain fine-tuning: the LM loss alone")
    step_jepa: bool = option(False, "each reasoning step predicts the next")
    train_all: bool = option(False, "short for --labels all", names=("trainall",))
    additive_mask: bool = option(False, "no effect; all views run in one pass without it")
    jepa_l2: bool = option(False, "short for --jepa_loss_type l2", group="loss")
    jepa_mse: bool = option(False, "short for --jepa_loss_type mse", group="loss")
    infonce: bool = option(False, "short for --jepa_loss_type infonce, at the published temperature 0.07", group="loss")
    term: list[str] | None = option(None, "terms of your own (docs/design.md)", metavar="module:Class", group="loss")
    term_args: list[Any] | None = option(
        None,
        "settings of each --term, in their order: '{\"weight\": 0.1}'",
        metavar="JSON",
        group="loss",
        parse=lambda text: {**json.loads(text)},
        expected="a JSON object in braces",
    )


def add_training_data(parser: Parser, model: type = ModelFlags) -> None:
    """Add the flags of records, model (a dataclass) and objective, which train, inspect and verify share."""
    parser.add(DataFlags, "data")
    parser.add(model, "model")
    parser.add(ShortFlags, OBJECTIVE)
    parser.add(JepaConfig, OBJECTIVE, without=("mode", "terms"))
    # No defaults, so that a flag that is given beside its short form is noticed.
    parser.set_defaults(**dict.fromkeys((*UNSET, "why_loss")))


def jepa_config(args: argparse.Namespace) -> JepaConfig:
    """Build the configuration that the shared flags describe."""
    refuse_both(args, ("regular", "step_jepa"))
    losses = [flag.removeprefix("jepa_") for flag in ("jepa_l2", "jepa_mse", "infonce") if getattr(args, flag)]
    losses += [args.jepa_loss_type] if args.jepa_loss_type is not None else []
    if len(set(losses)) > 1:
        raise UserError(f"more than one alignment loss is named ({', '.join(losses)}); leave one")
    if args.train_all and args.labels not in (None, "all"):
        raise UserError(f"--train_all means --labels all, and --labels {args.labels} is named too; leave one out")
    names, settings = args.term or [], args.term_args or [{} for _ in args.term or []]
    if len(settings) != len(names):
        raise UserError(f"--term_args: expected a JSON object for each --term ({{}} for none), got {len(settings)}")
    if args.regular:
        _refuse_views(args, losses)
    elif args.step_jepa and args.last_token not in (None, -1):
        note(f"--last_token {args.last_token} is followed here; the published Step-JEPA script leaves it unused")
    if args.additive_mask:
        note("--additive_mask changes nothing: all views are run in one pass anyway")
    loss, args.why_loss = (losses[0], None) if losses else _default_loss(args)
    resolved = {name: DEFAULTS[name] if getattr(args, name) is None else getattr(args, name) for name in UNSET} | {
        "mode": "regular" if args.regular else "step-jepa" if args.step_jepa else "llm-jepa",
        "jepa_loss_type": loss,
        # On the command line, \n stands for a line end.
        "step_separator": args.step_separator.replace("\\n", "\n"),
        "terms": tuple({"term": name, "args": own} for name, own in zip(names, settings, strict=True)),
        **({"labels": "all"} if args.train_all else {}),
    }
    refuse_without_effect({**vars(args), **resolved}, JepaConfig)
    try:
        return from_args(JepaConfig, args, **resolved)
    except ValueError as error:
        raise UserError(f"--{error}" if str(error).split(":")[0].isidentifier() else str(error)) from None


def _default_loss(args: argparse.Namespace) -> tuple[str, str | None]:
    """The alignment loss if no flag names one, and a note on it for the first screen.

    InfoNCE, unless a flag of ``PAPERS_LOSS`` or ``--term`` is set: published command lines name no loss but set such
    flags, and mean the papers' cosine, which mostly collapses to one direction (docs/how-to/collapse.md).
    """
    usual = {**DEFAULTS, **dict.fromkeys(UNSET)}
    named = {name for name in PAPERS_LOSS if getattr(args, name, usual[name]) != usual[name]}
    if not named and not args.term and not args.regular:
        return "infonce", "InfoNCE, the default, which does not collapse; --preset paper, or a named loss, for others"
    if args.regular or named & {"sigreg", "variance"}:
        return "cosine", None
    return "cosine", "cosine, the papers', since none is named; it mostly collapses, --jepa_loss_type infonce does not"


def note(text: str) -> None:
    """Print a note on standard error."""
    print(f"note: {text}", file=sys.stderr)


def _refuse_views(args: argparse.Namespace, losses: list[str]) -> None:
    """Refuse flags of views in regular training; note and reset those in ``PUBLISHED_WITH_REGULAR``."""
    named = [name for name in NEEDS_VIEWS if getattr(args, name) not in (None, DEFAULTS[name])]
    unused = [f"--{name}" for name in named if name not in (*PUBLISHED_WITH_REGULAR, "jepa_loss_type")]
    unused += [f"the alignment loss '{name}'" for name in losses]
    if unused:
        raise UserError(f"--regular has no views, so {unused[0]} does nothing with it; leave one out")
    if idle := [name for name in PUBLISHED_WITH_REGULAR if name in named]:
        note(f"--regular has no views, so {', '.join(f'--{name}' for name in idle)} have no effect")
        vars(args).update({name: DEFAULTS[name] for name in idle})


OURS = ("do_train", "do_eval", "do_predict", "remove_unused_columns")
"""Fields of TrainingArguments that are refused as flags, since they have no effect with this trainer."""


def arguments_of_file(parser: Parser, path: str, given: Sequence[str]) -> list[str]:
    """Read a YAML file of flags as arguments, without those that the command line ``given`` has, too."""
    file = existing_file(path, "configuration file")
    values = read_yaml(file)
    if not isinstance(values, dict | None):
        raise UserError(f"holds a {type(values).__name__}; expected 'flag: value' lines", path=file)
    flags = parser._option_string_actions
    overridden = {flags[flag].dest for flag in (each.partition("=")[0] for each in given) if flag in flags}
    result, seen = list[str](), {"config"}
    for key, value in (values or {}).items():
        name = str(key).replace("-", "_")
        try:
            if name in seen:
                raise UserError(f"the key {shown(str(key))} stands twice or is no flag of a file; leave it out")
            words = as_arguments({name: value})
            named_fields(parser, parser.parse_known_args(translate_train(words)[0])[1])
        except (ValueError, TypeError) as error:  # json's own for a date or for what holds itself
            lines = [line.lstrip(" \t{,'\"?") for line in read_text(file).splitlines()]
            line = next((number for number, text in enumerate(lines, start=1) if text.startswith(str(key))), None)
            raise UserError(str(error), path=file, line=line) from None
        seen.add(name)
        if f"--{name}" not in flags or flags[f"--{name}"].dest not in overridden:
            result += words
    return result


def training_parser() -> Any:
    """A parser of all fields of ``transformers.TrainingArguments``."""
    from transformers import HfArgumentParser, TrainingArguments

    return HfArgumentParser(TrainingArguments, add_help=False, allow_abbrev=False, argument_default=None)


def training_fields() -> list[str]:
    """The fields of ``transformers.TrainingArguments`` that are flags."""
    return [name for name in dict.fromkeys(each.dest for each in training_parser()._actions) if name not in OURS]


def more_help(ours: Parser) -> str:
    """Help on the flags of TrainingArguments that are not ours, for ``--help_all``."""
    inner, known = training_parser(), ours._option_string_actions
    for group in inner._action_groups:
        group._group_actions = [each for each in group._group_actions if not known.keys() & {*each.option_strings}]
    published = "\nFlags of the published scripts are translated: docs/published.md has a table of them.\n"
    return published + "\ntransformers.TrainingArguments:\n" + str(inner.format_help().partition("options:")[2])


@cache
def _named_fields_parser() -> Any:
    """A parser of the fields of TrainingArguments that returns only those that were named, not their defaults."""
    inner = training_parser()
    for action in inner._actions:
        action.default = argparse.SUPPRESS
        action.type = argument_type(READERS[action.type]) if action.type in READERS else action.type
        # transformers' own parser takes only one name of --report_to.
        action.nargs = "+" if action.dest == "report_to" else action.nargs
    return inner


def named_fields(parser: Parser, rest: Sequence[str]) -> dict[str, Any]:
    """The fields of TrainingArguments among the arguments that our parser does not know; others are refused."""
    if not rest:
        return {}
    inner = _named_fields_parser()
    inner.error = parser.error
    known, unknown = inner.parse_known_args(rest)
    if unknown:
        parser.refuse(unknown, [f"--{name}" for name in training_fields()])
    named = vars(known)
    if idle := [name for name in OURS if name in named]:
        parser.error(f"--{idle[0]}: it has no effect here; leave it out")
    if "hub_token" in named:
        # Every user of the machine can read a command line, and the run folder keeps it.
        parser.error("--hub_token: set HF_TOKEN in the environment; leave it out")
    return named
