"""The sub-commands of the command line."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

from stepjepa.base.terminal import note, spelling
from stepjepa.cli.parser import Parser, with_dashes
from stepjepa.config.run import FLAT

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
    "embed": "embed the texts of a file: questions and answers, or reasoning steps",
    "search": "find the texts of a corpus that are nearest to queries",
    "export": "merge an adapter into its base, or copy a trained model, as a plain model folder",
    "rerun": "repeat the run of a folder, if its data are still the same, and compare the weights",
    "completion": "print a script for the completion of commands, flags and files: bash, zsh, fish",
}
"""Name and one line of help of each, in the order of a typical workflow."""

_MODULES = {"verify": "inspect", "analyze": "inspect", "score": "evaluate", "report": "compare", "estimate": "train"}


@dataclass(frozen=True)
class Command:
    """A sub-command: the constant of its name, in capitals, in a module of this package.

    Attributes:
        run: runs it and returns the exit code, or the value that ``--json`` prints (exit code 1 if its ``passed`` is
            false); raises ``UserError`` for wrong input. With ``--json`` other output goes to standard error.
        flags: the dataclasses of its options, each with a heading.
        add: adds flags before those.
        common: names of the options that ``--help`` shows; with none it shows all.
        epilog: text at the end of the help.
        translate: translates the arguments of a published program into ours; returns them, and a note on each change.
        parse: parses the arguments of a command that accepts flags which its parser does not know.
        several: whether processes that torchrun starts run it together.
    """

    run: Callable[[argparse.Namespace], object]
    flags: tuple[tuple[type, str], ...] = ()
    add: Callable[[Parser], None] = lambda _: None
    common: str = ""
    epilog: str | None = None
    translate: Callable[[Sequence[str]], tuple[list[str], list[str]]] = lambda arguments: ([*arguments], [])
    parse: Callable[[Parser, Sequence[str]], argparse.Namespace] = Parser.parse_args
    several: bool = False


def load(name: str) -> Command:
    """Import a command by its name."""
    command: Command = getattr(importlib.import_module(f"{__package__}.{_MODULES.get(name, name)}"), name.upper())
    return command


def make_parser(name: str) -> Parser:
    """Create the parser of a command."""
    command = load(name)
    texts = {"prog": f"stepjepa {name}", "description": COMMANDS[name], "epilog": command.epilog}
    parser = Parser(common=command.common.split(), **texts)
    parser.takes_others = command.parse is not Parser.parse_args
    command.add(parser)
    for settings, group in command.flags:
        parser.add(settings, group)
    return parser


@cache
def known_flags(name: str) -> frozenset[str]:
    """Return the flags of a command and those of a run: notes on runs name the latter."""
    return frozenset([*make_parser(name).flags(), *(f"--{setting}" for setting in FLAT)])


def naming_flags(name: str) -> AbstractContextManager[None]:
    """Print settings as flags while a command is parsed or run."""
    return spelling(lambda text: with_dashes(text, known_flags(name)))


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments behind the name of a command, with flags as ``cli.main.normalise`` writes them."""
    command = load(name)
    with naming_flags(name):
        translated, notes = command.translate(arguments)
        for line in notes:
            note(line)
        return command.parse(make_parser(name), translated)
