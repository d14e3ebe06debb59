"""Run the Python block of README.md and write what it prints behind it; ``--check`` compares instead.

About a minute on two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "README.md"
_OUTPUT = re.compile(r"(<!-- output -->\n)(?:```text\n(.*?)\n```\n)?(<!-- end -->)", re.DOTALL)


def block() -> str:
    """Return the Python block of README."""
    match = re.search(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def shown() -> str:
    """Return the output that README shows for the block."""
    match = _OUTPUT.search(README.read_text(encoding="utf-8"))
    assert match is not None
    return match[2] or ""


def printed() -> str:
    """Run the block in a folder of its own; what its own calls of ``print`` print, without progress of the runs."""
    lines: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__", "print": lambda *words: lines.append(" ".join(map(str, words)))}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.chdir(folder)
        try:
            exec(compile(block(), str(README), "exec"), names)
        finally:
            os.chdir(before)
    return "\n".join(lines).rstrip("\n")


def main() -> int:
    """Write, or compare; 1 if README says something else."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check, output = parser.parse_args().check, printed()
    if check:
        print(output if output != shown() else "README.md shows what its block prints")
        return int(output != shown())
    text = README.read_text(encoding="utf-8")
    README.write_text(
        _OUTPUT.sub(lambda match: f"{match[1]}```text\n{output}\n```\n{match[3]}", text), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
