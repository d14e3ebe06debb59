"""``stepjepa completion``: print a shell script that completes commands, flags, choices and file names."""

import argparse
from dataclasses import dataclass
from typing import Literal

from stepjepa.base.errors import UserError
from stepjepa.cli.commands import COMMANDS, Command, make_parser
from stepjepa.config.option import option

EPILOG = """\
bash    stepjepa completion bash > ~/.local/share/bash-completion/completions/stepjepa
zsh     stepjepa completion zsh > ~/.zfunc/_stepjepa    (with fpath+=~/.zfunc before compinit in ~/.zshrc)
fish    stepjepa completion fish > ~/.config/fish/completions/stepjepa.fish

The script holds all names, so that completing starts no Python; print it again after an update."""


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
    from stepjepa.cli.flags import trainer_flags

    parser = argparse.ArgumentParser(prog="stepjepa")
    commands = parser.add_subparsers(dest="command")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, parents=[make_parser(name)], add_help=False)
    for name in ("train", "estimate"):
        subparser = commands.choices[name]
        for field in sorted({*trainer_flags()} - {*subparser._option_string_actions}):
            subparser.add_argument(field, help="of transformers.TrainingArguments")
    complete = {"FILE": shtab.FILE, "FILE.html": shtab.FILE, **dict.fromkeys(("DIR", "PATH", "RUN"), shtab.DIRECTORY)}
    parsers = [*commands.choices.values()]
    for command_parser in parsers:
        for action in command_parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers.extend(action.choices.values())
            elif action.metavar in complete:
                # The attribute that shtab reads.
                action.complete = complete[action.metavar]  # type: ignore[attr-defined]  # argparse does not declare it
    print(shtab.complete(parser, shell=args.shell))
    return 0


COMPLETION = Command(run, flags=((ShellFlag, "shell"),), epilog=EPILOG)
