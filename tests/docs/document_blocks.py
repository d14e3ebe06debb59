"""The blocks of code in documents: where they stand, what marks them, the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]

SHELL = ("bash", "sh", "shell", "console")
LANGUAGES = (*SHELL, "python", "json", "yaml", "text", "math", "diff")

PROGRAMS = re.compile(
    r"stepjepa|python3?|pip|make|torchrun|accelerate|sbatch|srun|git|cd|ls|cat|head|tail|pytest|export|\.|source|axolotl|"
    r"llamafactory-cli|lm[_-]eval|trl|vllm|tensorboard|docker|curl|wget|ollama|llama-cli|mlflow|wandb"
)
"""What a line of an indented block starts with if it is a command; indented blocks without one are no commands."""

MEASURES = "measures for minutes, and what it prints depends on the machine"
HUB = "reads a data set or a model of the hub"
LONG = "trains for minutes"

NOT_RUN: dict[str, list[tuple[str, str]]] = {
    # page -> (what the command begins with, reason); other reasons stand beside the block in an HTML comment
    "README.md": [("make", "run by CI"), ("pip install .", "make wheel-test installs the wheel")],
    "docs/usage.md": [("stepjepa prepare gsm8k --dataset", HUB), ("stepjepa train --train_file ../shared", LONG)],
    "docs/tutorial.md": [("make", "tests/examples runs it")],
    "CONTRIBUTING.md": [("make", "run by CI")],
    "SECURITY.md": [("make audit", "asks a database of vulnerabilities")],
    "docs/log.md": [("", "the log says what was run; its commands are those of its day")],
    "docs/results.md": [("", LONG)],
    "docs/performance.md": [("", MEASURES)],
    "docs/reliability.md": [("", "minutes of kills; the quick versions are tests")],
    "docs/scale.md": [("stepjepa estimate", "needs a GPU, or a configuration of the hub")],
    "docs/tasks.md": [("stepjepa prepare gsm8k", "needs the raw data set"), ("stepjepa prepare hellaswag", HUB)],
    "docs/coming-from.md": [("", "models, data and services of the reader; every command of ours is parsed")],
    "examples/README.md": [("", "tests/examples runs every example")],
}


def why_not(page: str, command: str) -> str | None:
    """The reason not to run a command of a page, or None."""
    return next((reason for start, reason in NOT_RUN.get(page, ()) if command.startswith(start)), None)


_MARK = re.compile(r"<!-- (not run|slow): .+? -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code."""

    page: str
    line: int  # its first line, counted from 1
    language: str
    fenced: bool
    title: str  # the file whose text it is
    text: str
    mark: str  # "not run", "slow" or nothing

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Its commands as lists of words, without comments and prompts; none if it is something else."""
        if self.title or (self.fenced and self.language not in SHELL):
            return []
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        blocks = []
        for line in (line.strip().removeprefix("$ ") for line in lines):
            if line.startswith(("(", "#")) or not line:
                continue
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a quotation mark alone: text, not a command
                continue
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words and (self.fenced or PROGRAMS.fullmatch(words[0])):
                blocks.append(words)
        return blocks


def documents() -> list[str]:
    """Every document with commands, by file name."""
    roots = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    return [*roots, *sorted(path.relative_to(ROOT).as_posix() for path in pages)]


def blocks(page: str) -> Iterator[Block]:
    """All blocks of code of one document, in their order."""
    mark = ""
    for token in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            title, fenced = re.search(r'title="(.+?)"', token.info), token.type == "fence"
            line = token.map[0] + 1 if token.map else 0
            text = token.content.rstrip("\n")
            yield Block(page, line, token.info.partition(" ")[0], fenced, title[1] if title else "", text, mark)
        # A mark stands right before its block.
        result = _MARK.match(token.content) if token.type == "html_block" else None
        mark = result[1] if result else ""
