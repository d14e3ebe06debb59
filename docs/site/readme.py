"""Run the code of README.md and write what it prints behind it; ``--check`` compares instead.

The Python block is shown with all that it prints, the shell block with what its evaluation says of retrieval and what
its search prints. About a minute and a half on two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

RETRIEVAL = ("nearest answer", "the same behind a linear map")
"""How the lines of ``evaluate`` begin that are shown."""

README = Path(__file__).resolve().parents[2] / "README.md"


def block() -> str:
    """Return the Python block of README."""
    match = re.search(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def commands() -> list[list[str]]:
    """Return the commands of README's section of the shell, as lists of words without ``stepjepa``."""
    section = README.read_text(encoding="utf-8").partition("\n## In the shell\n")[2].partition("\n## ")[0]
    return [shlex.split(line)[1:] for line in section.splitlines() if line.startswith("    stepjepa ")]


def shown(name: str) -> str:
    """Return the output that README shows behind ``<!-- name -->``."""
    match = _place(name).search(README.read_text(encoding="utf-8"))
    assert match is not None, f"README.md has no block '<!-- {name} -->'"
    return match[2] or ""


def printed() -> str:
    """Run the Python block in a folder of its own; what its own calls of ``print`` print, without progress."""
    lines: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__", "print": lambda *words: lines.append(" ".join(map(str, words)))}
    with _folder(), contextlib.redirect_stdout(sys.stderr):
        exec(compile(block(), str(README), "exec"), names)
    return "\n".join(lines).rstrip("\n")


def searched() -> str:
    """Run the commands of the shell in a folder of their own; what they print of retrieval and of the search."""
    from stepjepa.cli.main import main as stepjepa

    result: list[str] = []
    with _folder():
        for words in commands():
            with contextlib.redirect_stdout(io.StringIO()) as output:
                code = stepjepa(words)
            if code:
                raise SystemExit(f"error: stepjepa {shlex.join(words)}: exit code {code}")
            lines = output.getvalue().splitlines()
            if words[0] in ("evaluate", "search"):
                result += [line for line in lines if words[0] == "search" or line.startswith(RETRIEVAL)]
    return "\n".join(result)


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n)(?:```text\n(.*?)\n```\n)?(<!-- end -->)", re.DOTALL)


def _filled(output: str, place: re.Match[str]) -> str:
    """The place of an output, with that in it."""
    return f"{place[1]}```text\n{output}\n```\n{place[3]}"


PARTS = {"output": printed, "output of search": searched}


def main() -> int:
    """Write, or compare; 1 if README says something else."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", choices=PARTS, help="one of the two outputs")
    args = parser.parse_args()
    outputs = {name: run() for name, run in PARTS.items() if args.only in (None, name)}
    if args.check:
        wrong = {name: output for name, output in outputs.items() if output != shown(name)}
        for name, output in wrong.items():
            print(f"README.md shows another {name}; this was printed:\n{output}")
        if not wrong:
            print("README.md shows what its code prints")
        return int(bool(wrong))
    text = README.read_text(encoding="utf-8")
    for name, output in outputs.items():
        text = _place(name).sub(partial(_filled, output), text)
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
