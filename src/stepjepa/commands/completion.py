"""``stepjepa completion``: print a shell script that completes commands, flags, choices and file names."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal

from stepjepa.commands import COMMANDS, Command, make_parser
from stepjepa.errors import UserError
from stepjepa.options import option

EPILOG = """\
bash    stepjepa completion bash > ~/.local/share/bash-completion/completions/stepjepa
zsh     stepjepa completion zsh > ~/.zfunc/_stepjepa    (with fpath+=~/.zfunc before compinit in ~/.zshrc)
fish    stepjepa completion fish > ~/.config/fish/completions/stepjepa.fish

The script holds all names, so that completing starts no Python; print it again after an update."""

FILES, FOLDERS = ("FILE", "FILE.html"), ("DIR", "FOLDER", "PATH", "RUN")
"""Metavars of the flags that take a file, and of those that take a folder."""


@dataclass
class ShellFlag:
    """The shell that reads the script."""

    shell: Literal["bash", "zsh", "fish"] = option(help="the shell that reads the script", positional=True)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        raise UserError("needs the package shtab; run: pip install shtab") from None
    from stepjepa.arguments import training_fields

    parser = argparse.ArgumentParser(prog="stepjepa", description="Train language models with JEPA objectives.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command")
    for name, summary in COMMANDS.items():
        made = make_parser(name)
        inner = commands.add_parser(name, help=summary, parents=[made], add_help=False)
        if name in ("train", "estimate"):
            for field in training_fields():
                if f"--{field}" not in inner._option_string_actions:
                    inner.add_argument(f"--{field}", help="of transformers.TrainingArguments")
    _complete_files(parser, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, file: Any, folder: Any) -> None:
    """Tell shtab which flags of a parser and its sub-commands take files, and which take folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_files(inner, file, folder)
        elif action.metavar in (*FILES, *FOLDERS):
            # The attribute that shtab reads.
            action.complete = file if action.metavar in FILES else folder  # type: ignore[attr-defined]


COMPLETION = Command(run, flags=((ShellFlag, "shell"),), epilog=EPILOG)
