"""The command line: find the sub-command, parse, run, report errors on one line. No logic, and no torch."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence

from stepjepa import __version__
from stepjepa.commands import COMMANDS
from stepjepa.disk import naming_disk_errors
from stepjepa.errors import UserError, one_line, visible
from stepjepa.offline import go_offline, no_telemetry, wanted
from stepjepa.parser import innermost, make_parser, refuse_unknown
from stepjepa.signals import Stopped, end_with_launcher, raising
from stepjepa.terminal import open_standard_streams


def normalise(arguments: Sequence[str]) -> list[str]:
    """Flags with underscores, however they were written: ``--batch-size 4`` is ``--batch_size 4``."""
    result: list[str] = []
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[position:]]
        name, equals, value = argument.partition("=")
        # Only what is a flag: a value may begin with dashes too.
        flag = re.fullmatch(r"--[A-Za-z][\w-]*", name)
        if flag and value == "--":  # of which argparse would make an empty list
            raise UserError(f"{name} needs a value, and '--' is none; give it one, or leave the flag out")
        result.append(f"--{name[2:].replace('-', '_')}{equals}{value}" if flag else argument)
    return result


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{importlib.import_module(f'stepjepa.commands.{name}').SUMMARY}" for name in COMMANDS]
    return "\n".join(
        [
            "usage: stepjepa COMMAND [--help] ...",
            "",
            "Train causal language models with LLM-JEPA and Step-JEPA objectives, look inside, evaluate.",
            "",
            *lines,
            "",
            "stepjepa COMMAND --help says more; stepjepa --version prints the version.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: instead of those of the process.

    Returns:
        0 when all is well, 1 when a check failed, 2 for wrong input, 128 and the number of the signal that ended it.
    """
    open_standard_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help", "--version"):
        with raising():
            return _reporting("stepjepa", lambda: _introduce(given[:1] == ["--version"]))
    name = given[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "--help", "--version"], n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(COMMANDS)}"
        print(f"stepjepa: error: unknown command '{name}'{hint}", file=sys.stderr)
        return 2
    end_with_launcher()
    with raising():
        return _reporting(f"stepjepa {name}", lambda: _run(name, normalise(given[1:])))


def _introduce(version: bool) -> int:
    print(f"stepjepa {__version__}" if version else _overview())
    return 0


def _run(name: str, arguments: list[str]) -> int:
    # Before anything is imported that reads the environment.
    no_telemetry()
    if wanted(arguments):
        go_offline()
    command = importlib.import_module(f"stepjepa.commands.{name}")
    parser = make_parser(f"stepjepa {name}", command)
    # No warnings of libraries about each other, unless Python was told to warn.
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=FutureWarning)
    if hasattr(command, "parse"):
        parsed = command.parse(parser, arguments)
    else:
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            refuse_unknown(innermost(parser, parsed), unknown)
    return int(command.run(parsed))


def _reporting(program: str, act: Callable[[], int]) -> int:
    """Do what was asked for; whatever stops it is told on one line and becomes an exit code.

    Args:
        program: begins the line.
        act: gives the exit code.
    """
    try:
        try:
            code = act()
        except SystemExit as stop:
            code = _exit_code(program, stop)
        # Here, where a full disk or a closed pipe is answered; Python does it at its end, with a traceback.
        with naming_disk_errors("standard output"):
            sys.stdout.flush()
        return code
    except UserError as error:
        print(f"{program}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has had enough of it.
        _drop_output()
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: error: {visible(f'{where}{error.strerror or error}')}", file=sys.stderr)
        _drop_output()
        return 2
    except MemoryError:
        print(f"{program}: error: out of memory; give it less at a time, or a larger machine", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"{program}: {visible(str(stop) or 'interrupted')}", file=sys.stderr)
        return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)


def _exit_code(program: str, stop: SystemExit) -> int:
    """What ``sys.exit`` was called with, as Python itself takes it: a text is a message, and a failure."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(f"{program}: {one_line(str(stop.code))}", file=sys.stderr)
    return 1


def _drop_output() -> None:
    """Throw away what standard output does not take: Python would try once more at its end, with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
