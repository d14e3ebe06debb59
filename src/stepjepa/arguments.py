"""The flags that several commands share, and how they become configurations. Free of torch."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepjepa.config import CHOICES, DEFAULTS, NEEDS_VIEWS, SETTINGS, TYPES, JepaConfig, layouts_of
from stepjepa.errors import UserError, shown
from stepjepa.files import existing_file, read_text, read_yaml

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

STP = 0.02
"""Weight of ``--stp`` where no number is named."""

SHORT_LOSSES = {"jepa_l2": "l2", "jepa_mse": "mse", "infonce": "infonce"}


def boolean(text: str) -> bool:
    """The value of a switch that is written out, as in ``--lora True``."""
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got '{text}'")


def add_switch(group: argparse._ArgumentGroup, *names: str, help: str, default: bool = False) -> None:
    """A flag that is on when named; ``--flag false`` switches it off again."""
    group.add_argument(*names, nargs="?", const=True, default=default, type=boolean, metavar="BOOL", help=help)


def last_token(text: str) -> int | None:
    """The value of ``--last_token``: ``auto`` or a negative number."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 'auto' or a negative number, got '{text}'") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object written out, as in ``--term_args '{"weight": 0.1}'``."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {shown(text)} ({error})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object in braces, got {shown(text)}")
    return found


# Flags that are typed otherwise than their values are written down; the old word for trees is not shown.
_TYPED: dict[str, Any] = {
    "last_token": last_token,
    "over_length": lambda text: "skip" if text == "drop" else text,
    "encoding": lambda text: "tree" if text == "forest" else text,
}

# Without a default, so that it can be seen whether one was named: they have short forms.
_WITH_SHORT_FORMS = ("labels", "jepa_loss_type")


class _LayoutNames(tuple[str, ...]):
    """Names of layouts; ``module:function`` is taken for one, too, and looked for later."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or ":" in str(name)


def add_settings(group: argparse._ArgumentGroup, names: Iterable[str]) -> None:
    """Flags of fields of :class:`JepaConfig`, as their metadata describes them."""
    for name in names:
        about, kind, default = SETTINGS[name], TYPES[name], DEFAULTS[name]
        choices = _LayoutNames(layouts_of(*CHOICES["mode"])) if name == "layout" else CHOICES.get(name)
        if kind is bool:
            add_switch(group, f"--{name}", help=about["help"] + (" (on)" if default else ""), default=default)
            continue
        options: dict[str, Any] = {"type": _TYPED.get(name, None if choices else kind), "choices": choices}
        if choices is None:
            options["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
        if name == "stp":
            options |= {"nargs": "?", "const": STP}
        told = "" if default is None else " (0: off)" if default == 0.0 else f" ({default})"
        named = about["only_with"] is not None or name in _WITH_SHORT_FORMS
        group.add_argument(f"--{name}", default=None if named else default, help=about["help"] + told, **options)


def add_bad_records(group: argparse._ArgumentGroup) -> None:
    """``--bad_records``."""
    group.add_argument(
        "--bad_records",
        choices=("error", "skip"),
        default="error",
        help="skip: leave lines out that can't be read or are no record, and say how many (error)",
    )


def add_data_group(parser: argparse.ArgumentParser, *, required: bool = True) -> argparse._ArgumentGroup:
    """``--train_file`` and what limits a record."""
    group = parser.add_argument_group("data")
    group.add_argument("--train_file", required=required, metavar="FILE", help="JSON lines with 'messages'")
    add_settings(group, DATA)
    add_bad_records(group)
    return group


def add_model_group(parser: argparse.ArgumentParser, *, required: bool = True) -> argparse._ArgumentGroup:
    """``--model_name`` and how it is loaded."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model_name", required=required, metavar="NAME", help="folder, hub id, or preset:tiny, preset:small ..."
    )
    group.add_argument("--chat_template", metavar="FILE", help="Jinja file instead of the tokenizer's own template")
    add_switch(group, "--trust_remote_code", help="run code that comes with the model (off)")
    return group


DATA = ("max_length", "over_length")
"""Fields whose flags stand beside ``--train_file``."""


def add_objective_group(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Mode, layout and encoding."""
    group = parser.add_argument_group("objective (neither --regular nor --step_jepa means LLM-JEPA)")
    add_switch(group, "--regular", help="plain fine-tuning: the LM loss alone")
    add_switch(group, "--step_jepa", help="each reasoning step predicts the next")
    others = ("mode", *DATA)
    add_settings(group, (name for name in SETTINGS if name not in others and SETTINGS[name]["affects"] != "objective"))
    add_switch(group, "--train_all", "--trainall", help="short for --labels all")
    add_switch(group, "--additive_mask", help="of the published scripts; all views are run in one pass without it")
    return group


def add_loss_group(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The terms of the objective and their weights."""
    group = parser.add_argument_group("loss")
    add_settings(group, (name for name in SETTINGS if name != "terms" and SETTINGS[name]["affects"] == "objective"))
    for flag, name in SHORT_LOSSES.items():
        add_switch(group, f"--{flag}", help=f"short for --jepa_loss_type {name}")
    group.add_argument(
        "--term", nargs="+", action="extend", metavar="module:Class", help="terms of your own (docs/design.md)"
    )
    group.add_argument(
        "--term_args",
        nargs="+",
        action="extend",
        type=json_object,
        metavar="JSON",
        help="settings of each --term, in their order: '{\"weight\": 0.1}'",
    )
    return group


def objective_flags() -> set[str]:
    """The names of all flags of :func:`add_objective_group` and :func:`add_loss_group`."""
    parser = argparse.ArgumentParser()
    return {action.dest for add in (add_objective_group, add_loss_group) for action in add(parser)._group_actions}


def jepa_config(args: argparse.Namespace) -> JepaConfig:
    """The configuration that the shared flags describe.

    Raises:
        UserError: flags contradict each other or a value is out of range.
    """
    if args.regular and args.step_jepa:
        raise UserError("--regular and --step_jepa exclude each other; leave one out (neither means LLM-JEPA)")
    named = [name for flag, name in SHORT_LOSSES.items() if getattr(args, flag)]
    if args.jepa_loss_type is not None:
        named.append(args.jepa_loss_type)
    if len(set(named)) > 1:
        raise UserError(f"more than one alignment loss is named ({', '.join(named)}); leave one")
    if args.train_all and args.labels not in (None, "all"):
        raise UserError(f"--train_all means --labels all, and --labels {args.labels} is named too; leave one out")
    if args.jepa_ratio < 0:
        # How the published scripts say that no step is dropped.
        args.jepa_ratio = 1.0
    _refuse_without_effect(args, named)
    if args.additive_mask:
        print("note: --additive_mask changes nothing: all views are run in one pass anyway", file=sys.stderr)
    mode = "regular" if args.regular else "step-jepa" if args.step_jepa else "llm-jepa"
    # Fields of the same name; a flag that was not named leaves the field's default.
    same = {name: getattr(args, name) for name in DEFAULTS if getattr(args, name, None) is not None}
    same |= {"mode": mode, "jepa_loss_type": (named or ["cosine"])[0]}
    if args.train_all:
        same["labels"] = "all"
    # A literal separator is typed with \n for a line end.
    same["step_separator"] = args.step_separator.replace("\\n", "\n")
    same["terms"] = _terms(args)
    try:
        return JepaConfig(**same)
    except ValueError as error:
        raise UserError(f"--{error}" if str(error).split(":")[0].isidentifier() else str(error)) from None


def _terms(args: argparse.Namespace) -> tuple[dict[str, Any], ...]:
    """``--term`` and ``--term_args``, as :class:`JepaConfig` keeps them."""
    names, settings = args.term or [], args.term_args or []
    if settings and len(settings) != len(names):
        raise UserError(
            f"--term_args: expected a JSON object for each --term, in their order ({{}} for none), got {len(settings)} "
            f"for {len(names)}"
        )
    return tuple({"term": name, "args": own} for name, own in zip(names, settings or [{} for _ in names], strict=True))


# The published scripts name the first three also for their baseline.
PUBLISHED_WITH_REGULAR = ("predictors", "last_token", "lbd", "step_separator")


def _refuse_without_effect(args: argparse.Namespace, losses: list[str]) -> None:
    """No flag is ignored without a word."""
    if args.regular:
        refused = (name for name in NEEDS_VIEWS if name not in (*PUBLISHED_WITH_REGULAR, "jepa_loss_type"))
        unused = [f"--{name}" for name in refused if getattr(args, name) not in (None, DEFAULTS[name])]
        if unused or losses:
            what = unused[0] if unused else f"the alignment loss '{losses[0]}'"
            raise UserError(f"--regular has no views, so {what} does nothing with it; leave one out")
        noted = [f"--{name}" for name in PUBLISHED_WITH_REGULAR if getattr(args, name) != DEFAULTS[name]]
        if noted:
            print(f"note: --regular has no views, so nothing comes of {', '.join(noted)}", file=sys.stderr)
            for name in PUBLISHED_WITH_REGULAR:
                setattr(args, name, DEFAULTS[name])
    elif args.step_jepa and args.last_token not in (None, -1):
        print(
            f"note: --last_token {args.last_token} is followed here; the published Step-JEPA script leaves it unused",
            file=sys.stderr,
        )
    chosen = {**vars(args), "jepa_loss_type": losses[0] if losses else None}
    for name, about in SETTINGS.items():
        if about["only_with"] is not None and getattr(args, name) is not None:
            other, _, value = about["only_with"].partition(" ")
            if chosen[other] != value if value else not chosen[other]:
                raise UserError(f"--{name} does nothing without --{about['only_with']}; add it or leave both out")


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Flags as command line arguments; those of value None are left out."""
    result: list[str] = []
    for name, value in flags.items():
        if isinstance(value, list):
            result.extend([f"--{name}", *map(str, value)])
        elif value is not None:
            # One word, so that a value that begins with a dash is not taken for a flag.
            result.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return result


def without_flags(arguments: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """A command line without some of its flags.

    Args:
        arguments: with flags as ``cli.normalise`` writes them.
        flags: names without dashes, and whether they have a value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, has_value in flags.items():
        if has_value:
            parser.add_argument(f"--{name}", nargs="?")
        else:
            parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_known_args(list(arguments))[1]


# Values of a dict or list, with what they hold; one that YAML's references blow up has more than any flag takes.
_MOST_VALUES = 10_000


def arguments_of_file(path: str, flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A YAML file of flags as command line arguments, to be put before those of the command line, which then win.

    Args:
        path: a mapping from flag names, with ``_`` or ``-``, to values.
        flags: all names that exist, without dashes.

    Returns:
        The arguments; and for each flag, with its dashes, the file and line that it stands on.

    Raises:
        UserError: the file is missing, no YAML, or no mapping; it has an unknown key, and the nearest known one is
            named; or a value is none that a flag could have.
    """
    found = existing_file(path, "configuration file")
    values: Any = read_yaml(found)
    if values is None:
        return [], {}
    if not isinstance(values, dict):
        raise UserError(f"holds a {type(values).__name__}; expected 'flag: value' lines", path=found)
    places = _Places(found)
    flags_of_file: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in values.items():
        name, line = str(key).replace("-", "_"), places.line(str(key))
        if name not in flags or name == "config":
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "; see 'stepjepa train --help'"
            raise UserError(f"unknown key {shown(str(key))}{hint}", path=found, line=line)
        if name in flags_of_file:
            raise UserError(f"the key {shown(str(key))} stands twice; leave one", path=found, line=line)
        if wrong := _no_value(value):
            raise UserError(f"{name}: {wrong}", path=found, line=line)
        flags_of_file[name] = value
        origins[f"--{name}"] = f"{found}:{line}" if line else str(found)
    return as_arguments(flags_of_file), origins


def _no_value(value: Any) -> str | None:
    """Why something can't be the value of a flag; None where it can."""
    if isinstance(value, list):
        odd = next((each for each in value if each is None or isinstance(each, list | dict)), value)
        return None if odd is value else f"holds a {type(odd).__name__} in a list; expected words or numbers"
    if not isinstance(value, dict):
        return None
    waiting, count = [value], 0
    while waiting:
        each: Any = waiting.pop()
        count += 1
        if count > _MOST_VALUES:
            return f"holds more than {_MOST_VALUES:,} values; expected a few"
        if isinstance(each, dict):
            if not all(isinstance(key, str) for key in each):
                return "holds a key that is no word; put it in quotes"
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)
        elif not (each is None or isinstance(each, str | int | float)):
            return f"holds a {type(each).__name__}; put it in quotes"
    return None


class _Places:
    """Where the keys of a YAML file stand."""

    def __init__(self, path: Path) -> None:
        self._lines = [line.lstrip(" \t{,'\"?") for line in read_text(path).splitlines()]

    def line(self, key: str) -> int | None:
        """The line that a key begins, counted from 1; None where it can't be told."""
        return next((number for number, line in enumerate(self._lines, start=1) if line.startswith(key)), None)
