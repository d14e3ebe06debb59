"""The argument parser of every command: short help, and one-line errors that suggest the nearest known flag."""

from __future__ import annotations

import argparse
import copy
import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from stepjepa.errors import one_line


class Parser(argparse.ArgumentParser):
    """An argument parser with a short help, whose errors are one line with a remedy and exit code 2.

    Attributes:
        origins: file and line of each flag whose value is that of a configuration file, for errors.
        common: names of the options that ``--help`` shows, in short form; None shows all options in full.
    """

    origins: Mapping[str, str] = MappingProxyType({})
    common: Collection[str] | None = None
    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and keep the arguments for :meth:`error`."""
        self._given = list(args or ())
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """The help text: all options in full, or the common ones in short form."""
        if self.common is None:
            return super().format_help()
        formatter = argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=27)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([_short(each) for each in group._group_actions if each.dest in self.common])
            formatter.end_section()
        count = sum(each.dest not in self.common for each in self._actions)
        formatter.add_text(f"{self.epilog or ''}\n{self.prog} --help_all: {count} more flags.".strip())
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        named = re.findall(r"--\w+", message.partition(":")[0])
        # Show only the first name of a flag.
        message = re.sub(r"^argument (--\w+)(?:/--[\w-]+)+:", r"argument \1:", message)
        told = self._mistyped(message) or self._with_remedy(message)
        for flag in [*named, *re.findall(r"--\w+", told.partition(":")[0])] or re.findall(r"--\w+", told)[:1]:
            if flag in self.origins:
                told = f"{self.origins[flag]}: {told}"
                break
        self.exit(2, f"{self.prog}: error: {one_line(told)}\n")

    def _mistyped(self, message: str) -> str | None:
        """A message that suggests the right spelling if a required flag or a choice was mistyped; else None."""
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), n=1)
            return f"{message[: match.start()]}invalid choice '{match[1]}'; did you mean '{near[0]}'?" if near else None
        _, required, names = message.partition("the following arguments are required: ")
        for name in (argument.partition("=")[0] for argument in self._given if required):
            near = difflib.get_close_matches(name, re.split(r", |/", names), n=1)
            if near and name.startswith("--") and name not in self._option_string_actions:
                return f"unknown argument '{name}'; did you mean {near[0]}?"
        return None

    def _with_remedy(self, message: str) -> str:
        """Add what to do to a message of argparse that lacks it."""
        # argparse names the function that converts: Python's int and float, whole and number of stepjepa.options.
        if match := re.search(r"invalid (int|whole|float|number) value: ('.*')$", message):
            number = "a whole number" if match[1] in ("int", "whole") else "a number"
            return f"{message[: match.start()]}expected {number}, got {match[2]}"
        if match := re.fullmatch(r"argument (.+): expected (one|at least one) argument", message):
            action = self._option_string_actions.get(match[1])
            values = f": one of {', '.join(map(str, action.choices))}" if action and action.choices else ""
            return f"{match[1]} needs a value{values}; give it one, or leave the flag out"
        if match := re.fullmatch(r"the following arguments are required: (.+)", message):
            kinds = [action for action in self._actions if action.choices and match[1] in (action.metavar, action.dest)]
            what = f"; choose one of {', '.join(map(str, kinds[0].choices or ()))}" if kinds else ""
            return f"{message}{what or f'; {self.prog} --help says more'}"
        return message


def innermost(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the chosen sub-command (of any depth), or the parser itself if it has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return innermost(action.choices[getattr(parsed, action.dest)], parsed)
    return parser


def _short(action: argparse.Action) -> argparse.Action:
    """A copy of an option for the short help: one name, and the help text up to its first semicolon."""
    short = copy.copy(action)
    short.option_strings = list(action.option_strings[:1])
    short.help = getattr(action, "summary", action.help)
    short.metavar = None if action.metavar == "BOOL" else action.metavar
    short.nargs = 0 if action.metavar == "BOOL" else action.nargs
    return short


def make_parser(prog: str, command: Any) -> Parser:
    """Create the parser of a command.

    Args:
        prog: name of the command, for messages.
        command: the module ``stepjepa.commands.<name>``.
    """
    parser = Parser(prog=prog, description=command.SUMMARY, allow_abbrev=False)
    command.add_arguments(parser)
    add_general_flags(parser, getattr(command, "COMMON", None), getattr(command, "more_help", str))
    return parser


def add_general_flags(
    parser: argparse.ArgumentParser, common: Collection[str] | None = None, more_help: Callable[[], str] = str
) -> None:
    """Add ``--offline`` to a command and its sub-commands, and ``--help_all`` if ``--help`` does not show all options.

    Args:
        parser: parser of the command; ``cli`` acts on ``--offline`` before this parser runs.
        common: see :class:`Parser`.
        more_help: returns text for the end of ``--help_all``.
    """
    parser.add_argument("--offline", action="store_true", help="connect to no other machine")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in set(action.choices.values()):
                add_general_flags(inner)
    if common is None:
        return
    if isinstance(parser, Parser):
        parser.common = common
    if parser.usage is None:
        needed = [f"{each.option_strings[0]} {each.metavar}" for each in parser._actions if each.required]
        parser.usage = " ".join([parser.prog, *needed, "[flags below]"])

    class HelpAll(argparse.Action):
        def __call__(self, parser: Any, *_: Any) -> None:
            parser.common = None
            print(parser.format_help() + more_help())
            parser.exit()

    parser.add_argument("--help_all", action=HelpAll, nargs=0, help="show every flag")


OTHER_TOOLS = {
    "--base_model": "--model_name",
    "--cutoff_len": "--max_length",
    "--dataset_name": "--dataset",
    "--epochs": "--num_epochs",
    "--finetuning_type": "--lora",
    "--lora_r": "--lora_rank",
    "--lr": "--learning_rate",
    "--lr_scheduler": "--lr_scheduler_type",
    "--max_seq_length": "--max_length",
    "--micro_batch_size": "--batch_size",
    "--model": "--model_name",
    "--quantization_bit": "--load_in_4bit",
    "--sequence_len": "--max_length",
    "--use_peft": "--lora",
    "--val_set_size": "--eval_split",
}
"""Flags of TRL, Axolotl, LLaMA-Factory or common use, and their names in ``train``, which similar spelling misses."""

NO_COUNTERPART = ("--packing", "--sample_packing", "--neat_packing", "--padding_free", "--lora_target_modules")
"""Flags of those tools without a counterpart here; ``docs/coming-from.md`` explains why."""


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str], known: Sequence[str] = ()) -> NoReturn:
    """Exit with an error that names the first unknown argument and the flag that was probably meant.

    Args:
        parser: parser of the command.
        unknown: the unknown arguments.
        known: known flags besides those of the parser.
    """
    name = unknown[0].partition("=")[0]
    if not name.startswith("-"):
        # For example a second file after --train_file, or an unquoted text with spaces.
        remedy = "leave it out, put several files together into one, or a text with blanks into quotes"
        parser.error(f"unknown argument '{unknown[0]}', which belongs to no flag; {remedy}")
    flags = [flag for action in parser._actions for flag in action.option_strings] + list(known)
    if name in NO_COUNTERPART:
        parser.error(f"'{name}' of other tools has no counterpart here (docs/coming-from.md); leave it out")
    meant = OTHER_TOOLS.get(name)
    near = [meant] if meant in flags else difflib.get_close_matches(name, flags, n=1)
    all_flags = "--help" if getattr(parser, "common", None) is None else "--help_all"
    parser.error(
        f"unknown argument '{unknown[0]}'"
        + (f"; did you mean {near[0]}?" if near else f"; {parser.prog} {all_flags} names all")
    )
