"""What the examples share: commands are shown before they are run, and no folder is written to twice."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from stepjepa.cli.main import main

TINY = "--max_steps 2 --batch_size 4 --warmup_steps 0 --logging_steps 1"
"""Flags of ``train`` for the smallest size: they show that all runs, and no more."""


def parser(text: str | None, name: str) -> argparse.ArgumentParser:
    """A parser of the arguments that every example takes: ``--output_dir`` and ``--tiny``.

    Args:
        text: the docstring of the example; its first line is the help.
        name: of its folder under ``runs/``.
    """
    found = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    found.add_argument("--output_dir", type=Path, help=f"must not be there yet (the next free runs/{name}-N)")
    found.add_argument("--tiny", action="store_true", help="a size that shows only that everything runs, in seconds")
    return found


def new_folder(name: str, wanted: Path | None = None) -> Path:
    """A folder that is not there yet, so that nothing of an earlier run is touched: the next one of ``runs/``, or this.

    Raises:
        SystemExit: the wanted one is there.
    """
    if wanted is not None and wanted.exists():
        sys.exit(f"{wanted} is there already; name another --output_dir, or remove it")
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return wanted or folder


def arguments(text: str | None, name: str) -> argparse.Namespace:
    """The arguments of an example that takes no others; its ``output_dir`` is not there yet."""
    args = parser(text, name).parse_args()
    args.output_dir = new_folder(name, args.output_dir)
    return args


def stepjepa(words: Sequence[str], path: Path | None) -> int:
    """Run a command in this process, which has all libraries loaded; returns its exit code."""
    if path is not None and str(path) not in sys.path:
        sys.path.append(str(path))
    return main(list(words))


def command(line: str, *, path: Path | None = None, expected: int = 0) -> None:
    """Show a command and run it.

    Args:
        line: what stands behind ``stepjepa``.
        path: where Python finds a module of one's own that the command names.
        expected: its exit code.

    Raises:
        SystemExit: it ended in another way, and has said why.
    """
    before = "" if path is None else f"PYTHONPATH={shlex.quote(str(path))} "
    print(f"\n$ {before}stepjepa {line}", flush=True)
    code = stepjepa(shlex.split(line), path)
    if code != expected:
        sys.exit(code or 1)
