"""The pages of the reference: commands from their parsers, settings and the Python face from their docstrings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import stepjepa
from stepjepa.cli.commands import COMMANDS, make_parser
from stepjepa.config.jepa import CHOICES, DEFAULTS, SETTINGS
from stepjepa.views.layouts import LAYOUTS

GROUPS = {
    "Records": ("data",),
    "Views and layouts": ("views",),
    "Batches": ("batch",),
    "Models": ("models",),
    "Runs": ("running", "evaluation", "store"),
    "Settings": ("config",),
    "Objectives": ("objectives",),
    "Training": ("training",),
    "Comparison": ("study",),
    "Errors": ("base",),
}
"""Heading -> packages of the names that stand under it."""

INHERITED = {
    "JepaTrainer": (
        "evaluate",
        "get_eval_dataloader",
        "get_test_dataloader",
        "save_model",
        "create_model_card",
        "init_hf_repo",
    ),
}
"""Class -> methods of a base class of the package that are described with it."""


def pages() -> dict[str, str]:
    """File name -> Markdown."""
    return {"cli.md": commands(), "config.md": settings(), "api.md": names()}


def commands() -> str:
    """Every command, its flags by group, as its parser has them."""
    lines = [
        "# Commands",
        "",
        "Made from the parsers when this site was built. Flags may be written with `_` or `-`.",
        "",
    ]
    for name in COMMANDS:
        lines += _command(make_parser(name), 2)
    return "\n".join(lines) + "\n"


def _command(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {parser.prog}", "", _sentence(parser.description or ""), "")
    yield from ("```text", parser.format_usage().strip(), "```", "")
    for group in parser._action_groups:
        flags = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        inner = [action for action in flags if isinstance(action, argparse._SubParsersAction)]
        flags = [action for action in flags if action not in inner and "--help" not in action.option_strings]
        if flags:
            title = {"positional arguments": "arguments", "options": "flags"}.get(group.title or "", group.title)
            yield from (f"**{_sentence(title or 'flags')[:-1]}**", "", "| flag | meaning |", "|---|---|")
            yield from (f"| {_flag(action)} | {_meaning(action)} |" for action in flags)
            yield ""
        for action in inner:
            # A kind has a name for each way of spelling it.
            for kind in dict.fromkeys(action.choices.values()):
                yield from _command(kind, level + 1)
    if parser.epilog:
        yield from (_cell(parser.epilog), "")


def _sentence(text: str) -> str:
    text = _cell(text)
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _flag(action: argparse.Action) -> str:
    shown = " ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    switch = action.nargs == 0 or (action.nargs == "?" and action.const is True)
    if not switch and action.option_strings:
        value = action.metavar or ("" if action.choices else action.dest.upper())
        shown += "".join(f" {each}" for each in ((value,) if isinstance(value, str) else value) if each)
    return shown


def _meaning(action: argparse.Action) -> str:
    choices = [f"`{choice}`" for choice in action.choices or ()]
    said = _cell((action.help or "").replace("%%", "%") % {"default": action.default} if action.help else "")
    return "; ".join(part for part in (" or ".join(choices), said) if part)


def _cell(text: str) -> str:
    """Text of a parser in Markdown: on one line, with nothing in it that means something."""
    flat = " ".join(text.split())
    for sign in "\\|*_<>[]":
        flat = flat.replace(sign, f"\\{sign}" if sign not in "<>|" else {"<": "&lt;", ">": "&gt;", "|": "&#124;"}[sign])
    return flat


def settings() -> str:
    """The page of ``JepaConfig``."""
    lines = [
        "# Settings",
        "",
        "Every field below is a flag of `stepjepa train`, `inspect`, `verify` and `estimate` with the same name;",
        "`mode` is `--regular`, `--step_jepa` or neither. In a file of `--config` flags stand without dashes, switches",
        "are `true` or `false`. All fields of `transformers.TrainingArguments` that mean something here stand in the",
        "same file (`stepjepa train --help_all` lists them).",
        "",
        "| field | default | values | meaning |",
        "|---|---|---|---|",
        *(f"| `{name}` | {_default(name)} | {_values(name)} | {_cell(SETTINGS[name]['help'])} |" for name in SETTINGS),
        "",
        "::: stepjepa.config.jepa.JepaConfig",
    ]
    return "\n".join(lines) + "\n"


def _default(name: str) -> str:
    return "by mode" if name in ("layout", "predictors") else f"`{DEFAULTS[name]}`"


def _values(name: str) -> str:
    if "allowed" in SETTINGS[name]:
        return str(SETTINGS[name]["allowed"][1])
    values = LAYOUTS if name == "layout" else CHOICES.get(name, ())
    return ", ".join(f"`{value}`" for value in values)


def names() -> str:
    """Every public name of the package, under the heading of its part."""
    lines = ["# Python", "", "`from stepjepa import ...` has these names; torch is imported at first use of one.", ""]
    placed = []
    for heading, packages in GROUPS.items():
        lines += [f"## {heading}", ""]
        for name, home in stepjepa._HOME.items():
            if home.partition(".")[0] in packages:
                placed.append(name)
                if name == "JepaConfig":
                    # The settings have a page of their own.
                    lines += ["[JepaConfig](config.md)", ""]
                    continue
                lines.append(f"::: stepjepa.{home}.{name}")
                if name in INHERITED:
                    lines += ["    options:", f"      inherited_members: [{', '.join(INHERITED[name])}]"]
                lines.append("")
    if missing := set(stepjepa._HOME) - set(placed):
        raise ValueError(f"no heading in GROUPS for {', '.join(sorted(missing))}")
    lines += ["## A task of one's own", "", "::: stepjepa.tasks.base", ""]
    return "\n".join(lines)
