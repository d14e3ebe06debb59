"""What the examples share: commands are shown before they are run, and no folder is written to twice."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TINY = "--max_steps 2 --batch_size 4 --warmup_steps 0 --logging_steps 1"
"""Flags of ``train`` for the smallest size: they show that all runs, and no more."""


def new_folder(name: str) -> Path:
    """A folder of ``runs/`` that is not there yet: nothing of an earlier run is touched."""
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def arguments(text: str | None, name: str) -> argparse.Namespace:
    """The arguments that every example takes.

    Args:
        text: the docstring of the example; its first line is the help.
        name: of its folder under ``runs/``.

    Returns:
        ``output_dir``, which is not there yet, and ``tiny``.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, help=f"must not be there yet (the next free runs/{name}-N)")
    parser.add_argument("--tiny", action="store_true", help="a size that shows only that everything runs, in seconds")
    args = parser.parse_args()
    if args.output_dir is None:
        args.output_dir = new_folder(name)
    if args.output_dir.exists():
        parser.error(f"{args.output_dir} is there already; name another --output_dir, or remove it")
    return args


def stepjepa(words: Sequence[str], path: Path | None) -> int:
    """Run a command in a process of its own, as the shell would; returns its exit code."""
    environment = dict(os.environ) if path is None else os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, "-m", "stepjepa", *words], env=environment, check=False).returncode


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
