"""The sub-commands of the command line."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepjepa.options import Parser

COMMANDS = {
    "prepare": "make training files: from published data sets, raw responses, or generated",
    "inspect": "show what records become: sequences, the tree of their tokens, labels, readouts",
    "verify": "check model, data, masks and losses against slow and obvious computations",
    "train": "train a model: regular, LLM-JEPA or Step-JEPA",
    "evaluate": "generate answers for a test file and score them",
    "score": "score answers that another program generated",
    "compare": "compare methods over seeds with a baseline: tests, intervals, tables, a picture",
    "report": "show runs: one table, or one HTML page with everything to look at",
    "sweep": "train and evaluate every combination of a grid, over several seeds",
    "analyze": "look at the representations of trained models: numbers and pictures",
    "estimate": "tokens, FLOPs, memory and time of a run, before there is a device for it",
    "export": "merge an adapter into its base, or copy a trained model, as a plain model folder",
    "rerun": "repeat the run of a folder, if its data are still the same, and compare the weights",
    "completion": "print a script for the completion of commands, flags and files: bash, zsh, fish",
}
"""Name and one line of help of each, in the order of a typical workflow."""

_MODULES = {"score": "evaluate", "report": "compare", "estimate": "train"}


@dataclass(frozen=True)
class Command:
    """A sub-command: the constant of its name, in capitals, in a module of this package.

    Attributes:
        run: runs it and returns the exit code.
        flags: the dataclasses of its options, each with a heading.
        add: adds flags before those.
        common: the options that ``--help`` shows; with none it shows all.
        epilog: text at the end of the help.
        usage: the first line of the help, unless required flags and "[flags below]" say it all.
        parse: parses the arguments, for a command that takes flags which its parser does not know.
        more_help: text at the end of ``--help_all``.
    """

    run: Callable[[argparse.Namespace], int]
    flags: tuple[tuple[type, str], ...] = ()
    add: Callable[[Parser], None] = lambda _: None
    common: tuple[str, ...] = ()
    epilog: str | None = None
    usage: str | None = None
    parse: Callable[[Parser, Sequence[str]], argparse.Namespace] | None = None
    more_help: Callable[[], str] = str


def load(name: str) -> Command:
    """Import a command by its name."""
    module = importlib.import_module(f"stepjepa.commands.{_MODULES.get(name, name)}")
    command: Command = getattr(module, name.upper())
    return command


def make_parser(name: str) -> Parser:
    """Create the parser of a command."""
    command = load(name)
    parser = Parser(
        prog=f"stepjepa {name}",
        description=COMMANDS[name],
        epilog=command.epilog,
        usage=command.usage,
        common=command.common,
        more_help=command.more_help,
        takes_others=command.parse is not None,
    )
    command.add(parser)
    for settings, group in command.flags:
        parser.add(settings, group)
    return parser


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command.

    Args:
        name: of the command.
        arguments: the arguments behind it, with flags as ``cli.normalise`` writes them.

    Raises:
        UserError: an argument is unknown, wrong or missing.
    """
    parser, own = make_parser(name), load(name).parse
    return parser.parse_args(list(arguments)) if own is None else own(parser, arguments)
