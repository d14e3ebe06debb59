"""``stepjepa completion``: print a shell script that completes commands, flags, choices and file names."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from stepjepa.commands import COMMANDS
from stepjepa.errors import UserError
from stepjepa.parser import add_general_flags

SUMMARY = "print a script for the completion of commands, flags and files: bash, zsh, fish"

EPILOG = """\
bash    stepjepa completion bash > ~/.local/share/bash-completion/completions/stepjepa
zsh     stepjepa completion zsh > ~/.zfunc/_stepjepa    (with fpath+=~/.zfunc before compinit in ~/.zshrc)
fish    stepjepa completion fish > ~/.config/fish/completions/stepjepa.fish

For this shell alone: eval "$(stepjepa completion bash)". The script holds all names, so that completing starts no
Python; print it again after an update."""

SHELLS = ("bash", "zsh", "fish")

FILES, FOLDERS = ("FILE", "FILE.html"), ("DIR", "FOLDER", "PATH", "RUN")
"""Metavars of the flags that take a file, and of those that take a folder."""

MODEL_FLAGS = ("model_name", "model_path")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``shell``."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script.

    Raises:
        UserError: shtab, which generates the script, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise UserError("needs the package shtab; run: pip install shtab") from None
    print(shtab.complete(whole_parser(), shell=args.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """A parser with every command as a sub-command. shtab reads names from it; it never parses anything."""
    import shtab

    parser = argparse.ArgumentParser(prog="stepjepa", description="Train language models with JEPA objectives.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command")
    for name in COMMANDS:
        module = importlib.import_module(f"stepjepa.commands.{name}")
        inner = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(inner)
        add_general_flags(inner, getattr(module, "COMMON", None))
        if name in ("train", "estimate"):
            _add_fields_of_trainer(inner)
        _complete(inner, {"file": shtab.FILE, "folder": shtab.DIRECTORY})
    return parser


def _complete(parser: argparse.ArgumentParser, kinds: dict[str, Any]) -> None:
    """Tell shtab which flags take files and which take folders, and give the task flags their choices."""
    from stepjepa.tasks.registry import AUTO, TASKS

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete(inner, kinds)
        elif action.metavar in FILES:
            action.complete = kinds["file"]  # type: ignore[attr-defined]  # the attribute that shtab reads
        elif action.metavar in FOLDERS or action.dest in MODEL_FLAGS:
            action.complete = kinds["folder"]  # type: ignore[attr-defined]  # likewise
        elif action.dest in ("task", "eval_task"):
            action.choices = [AUTO, *TASKS]


def _add_fields_of_trainer(parser: argparse.ArgumentParser) -> None:
    """Add the fields of transformers.TrainingArguments that are not flags yet."""
    from stepjepa.commands.train import training_fields

    group = parser.add_argument_group("transformers.TrainingArguments")
    for name in training_fields():
        if f"--{name}" not in parser._option_string_actions:
            group.add_argument(f"--{name}", help="of transformers.TrainingArguments")
