"""Shared parts of the examples: they show commands before they run them, and write to no folder twice."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

from stepjepa import UserError
from stepjepa.cli.main import main

TINY = "--max_steps 2 --batch_size 4 --warmup_steps 0 --logging_steps 1"
"""Flags of ``train`` for the smallest size: they show that all runs, and no more."""


def parser(text: str | None, name: str) -> argparse.ArgumentParser:
    """Make a parser of the arguments of all examples: ``--output_dir`` and ``--tiny``.

    Args:
        text: the docstring of the example; its first line is the help.
        name: of its folder under ``runs/``.
    """
    result = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    result.add_argument("--output_dir", type=Path, help=f"must not be there yet (the next free runs/{name}-N)")
    result.add_argument("--tiny", action="store_true", help="a size that shows only that everything runs, in seconds")
    return result


def new_folder(name: str, wanted: Path | None = None) -> Path:
    """A folder that is not there yet, so that nothing of an earlier run is touched: the next one of ``runs/``, or this.

    Raises:
        SystemExit: the wanted one is there.
    """
    if wanted is not None and wanted.exists():
        sys.exit(f"{wanted} already exists; name another --output_dir, or remove it")
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return wanted or folder


def arguments(text: str | None, name: str) -> argparse.Namespace:
    """The arguments of an example that takes no others; its ``output_dir`` is not there yet."""
    args = parser(text, name).parse_args()
    args.output_dir = new_folder(name, args.output_dir)
    return args


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object a line; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@contextmanager
def user_errors() -> Iterator[None]:
    """End with one line, instead of a traceback, for an error that the user can correct."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")


def use_free_cores() -> None:
    """Compute with as many threads as cores are free: threads that wait for each other are ten times slower.

    What other programs use is told by the load of the last minute.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores - busy)))


def stepjepa(words: Sequence[str], path: Path | None) -> int:
    """Run a command in this process, which has all libraries loaded; returns its exit code."""
    if path is not None and str(path) not in sys.path:
        sys.path.append(str(path))
    return main(list(words))


def step(name: str, line: str, log: Path, *, verbose: bool = False) -> None:
    """Run a command as one step of an example, which prints one line: its name and its time.

    Progress bars on a terminal stand between two such lines.

    Args:
        name: of the step.
        line: what stands behind ``stepjepa``.
        log: a file that gets the command, what it prints and its notes, at its end.
        verbose: print these, too.

    Raises:
        SystemExit: the command has failed, and has said why.
    """
    if verbose:
        command(line)
        return
    bars = sys.stderr.isatty()
    print(f"{name:<28}", end="\n" if bars else "", flush=True)
    start, notes = time.time(), io.StringIO()
    log.parent.mkdir(parents=True, exist_ok=True)
    # Warnings belong to what is printed; without effect where logging is set up.
    logging.basicConfig(filename=log, format="%(levelname)s %(name)s: %(message)s")
    with log.open("a", encoding="utf-8") as stream:
        print(f"$ stepjepa {line}", file=stream)
        try:
            with redirect_stdout(stream), nullcontext() if bars else redirect_stderr(notes):
                code = stepjepa(shlex.split(line), None)
        finally:
            print(notes.getvalue(), end="", file=stream)
    ending = f"{time.time() - start:4.0f} s" if code == 0 else f"failed; see {log}"
    print(f"{name:<28}{ending}" if bars else ending, flush=True)
    if code:
        print(notes.getvalue(), end="", file=sys.stderr)
        sys.exit(code)


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
