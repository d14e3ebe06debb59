"""The command line: find the command, parse its flags, run it, report errors on one line. Free of torch."""

import importlib.metadata
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from stepjepa.base.errors import ANOTHER_ENDED, UserError, one_line, visible
from stepjepa.base.files import DISK_REMEDIES, naming_disk_errors
from stepjepa.base.offline import set_environment
from stepjepa.base.processes import as_single_process, check_launch, claim_report, started_together
from stepjepa.base.signals import Stopped, raising
from stepjepa.base.terminal import escape_unencodable_output, print_json
from stepjepa.cli.commands import COMMANDS, known_flags, load, make_parser, naming_flags, parse
from stepjepa.cli.flags import trainer_flags
from stepjepa.cli.parser import error_with_dashes, suggestion


def normalise(arguments: Sequence[str]) -> list[str]:
    """Replace dashes inside flag names by underscores: ``--batch-size 4`` becomes ``--batch_size 4``.

    ``--output_dir -x`` becomes ``--output_dir=-x``: argparse would take the folder for a flag.
    """
    # Whole flags only: a value may begin with dashes, too.
    flag = re.compile(r"\A--[A-Za-z][\w-]*(?==|\Z)")
    words: list[str] = []
    for argument in arguments:
        if words and flag.fullmatch(words[-1]) and re.match("-(?!h$)[^-0-9.]", argument):
            words[-1] += f"={argument}"
        else:
            words.append(flag.sub(lambda match: "--" + match[0][2:].replace("-", "_"), argument))
    return words


OVERVIEW = f"""usage: stepjepa COMMAND [--help] ...

Train causal language models with LLM-JEPA and Step-JEPA objectives, look inside, evaluate.

{chr(10).join(f"  {name:<12}{summary}" for name, summary in COMMANDS.items())}

stepjepa COMMAND --help says more; stepjepa --version prints the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the arguments are those of the process if none are given.

    Returns:
        The exit code: 0 for success, 1 for a failed check or a closed pipe, 2 for wrong input or a system
        error, 128 + N for signal N.
    """
    escape_unencodable_output()
    name, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with raising():
        return _run_and_report(name, words)


def _run(name: str, words: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    if name == "--version":
        print(f"stepjepa {importlib.metadata.version('stepjepa')}")
        return 0
    if name == "help" and words:
        name, words = words[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(OVERVIEW)
        return 0
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'; {suggestion(name, COMMANDS)}")
    arguments = normalise(words)
    # Before the import of libraries that read the environment.
    set_environment(arguments)
    # Hide the libraries' warnings about each other, unless Python was started with options for warnings.
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a picture has a box instead
    args, several = parse(name, arguments), load(name).several
    check_launch()
    if started_together() > 1 and not several:
        raise UserError("every process would do the same and write the same files; start one process, without torchrun")
    # Standard output then holds one JSON document.
    output = redirect_stdout(sys.stderr) if getattr(args, "json", False) else nullcontext()
    with naming_flags(name), output, nullcontext() if several else as_single_process():
        result = load(name).run(args)
    if isinstance(result, int):
        return result
    if args.json:
        print_json(result)
    return int(isinstance(result, dict) and result.get("passed") is False)


def _error_with_dashes(name: str, message: str, *, interrupted: bool = False) -> str:
    """Return an error of the library, which names settings, with the command's flags in their place."""
    if name not in COMMANDS:
        return message
    flags = known_flags(name) if name in ("rerun", "sweep") else {*make_parser(name).flags()}
    # An interruption names no flag of transformers, whose import it may have broken off.
    if "transformers" in sys.modules and name in ("train", "estimate") and not interrupted:
        flags = {*flags, *trainer_flags()}
    return error_with_dashes(message, flags)


def _run_and_report(name: str, words: Sequence[str]) -> int:
    """Run a command; an error is printed on one line that begins with its name, and becomes the exit code."""
    try:
        try:
            code = _run(name, words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        # Flush here, where errors are handled; Python's own flush at exit would print a traceback.
        with naming_disk_errors("standard output"):
            sys.stdout.flush()
        return code
    except UserError as error:
        message, code = f"error: {_error_with_dashes(name, one_line(error))}", 2
    except BrokenPipeError:
        # The reader of the output has closed the pipe, as ``head`` does.
        message, code = "", 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        remedy = f"; {DISK_REMEDIES[error.errno]}" if error.errno in DISK_REMEDIES else ""
        message, code = f"error: {visible(f'{where}{error.strerror or error}{remedy}')}", 2
    except MemoryError:
        message, code = "error: out of memory; give it less at a time, or a larger machine", 2
    except KeyboardInterrupt as stop:
        message = _error_with_dashes(name, visible(str(stop) or "interrupted"), interrupted=True)
        code = 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    message = message and (f"stepjepa {name}: {message}" if name in COMMANDS else f"stepjepa: {message}")
    if message and claim_report(message, follows=code > 128 or ANOTHER_ENDED in message):
        print(message, file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        # Discard output that can't be written: Python's own flush at exit would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
