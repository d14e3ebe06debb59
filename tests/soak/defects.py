"""The ordinary mistakes that once ended with exit code 0 and a wrong result, or with a traceback: each is tried again.

``python tests/soak/defects.py`` drives the command line in a temporary folder, with a tiny model, and prints a table of
what was tried and what came of it; its exit code is 1 where something is neither refused nor right. ``--paste FILE``
writes the table between the marks of a page.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file, save_file

import tiny
from stepjepa.cli import main as stepjepa
from stepjepa.files import locked
from stepjepa.models.presets import train_tokenizer

MARKS = "<!-- defects -->", "<!-- end -->"
THINKING = "<think>One.\n\nTwo.</think>\n\nFirst 3.\n\nThen 4."


class Ground:
    """A folder with a model, records and a finished run, and what commands in it came to.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        texts = [message["content"] for record in tiny.records() for message in record.messages]
        tiny.write_material(folder, train_tokenizer(texts, 290))
        self.data, self.base, self.run = folder / "data.jsonl", folder / "base", folder / "run"
        self.model = ["--model_name", self.base, "--use_cpu", "--batch_size", 3, "--max_steps", 2, "--save_steps", 1]
        code, said = self.stepjepa("train", "--train_file", self.data, *self.model, "--output_dir", self.run)
        assert code == 0, said
        self._places = 0

    def stepjepa(self, *command: Any) -> tuple[int, str]:
        """The exit code of a command, and what it said."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code = stepjepa([str(each) for each in command])
            except SystemExit as end:
                code = int(end.code or 0)
        return code, said.getvalue()

    def new(self) -> Path:
        """A path where nothing is."""
        self._places += 1
        return self.folder / f"new{self._places}"

    def train(self, *flags: Any, data: Path | None = None, output: Path | None = None) -> tuple[int, str]:
        """A training of two steps; flags win over what stands here."""
        file = ["--train_file", data or self.data, "--output_dir", output or self.new()]
        return self.stepjepa("train", *file, *self.model, *flags)

    def file(self, text: str, suffix: str = ".jsonl") -> Path:
        """A new file."""
        path = self.new().with_suffix(suffix)
        path.write_text(text, encoding="utf-8")
        return path

    def copy(self, source: Path) -> Path:
        """A copy of a folder."""
        return Path(shutil.copytree(source, self.new()))

    def weights(self, change: Callable[[dict[str, Any]], Any]) -> Path:
        """A copy of the run with changed weights and without the checksums of the old ones."""
        folder = self.copy(self.run)
        (folder / "checksums.json").unlink(missing_ok=True)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


Outcome = tuple[bool, str]
Case = tuple[str, str, Callable[[Ground], Iterator[Outcome]]]
CASES: list[Case] = []


def case(item: str, tried: str) -> Callable[[Callable[[Ground], Iterator[Outcome]]], None]:
    """Register a case: it yields whether an attempt went as it should, and what came of it."""
    return lambda act: CASES.append((item, tried, act))


def refused(result: tuple[int, str], *words: str) -> Outcome:
    """A user's error: exit code 2, no traceback, and a last line with these words."""
    code, said = result
    line = (said.strip().splitlines() or [""])[-1]
    return code == 2 and "Traceback" not in said and all(word in line for word in words), line


def right(result: tuple[int, str], *words: str) -> Outcome:
    """Exit code 0, and these words said."""
    code, said = result
    found = [line for line in said.splitlines() if any(word in line for word in words)]
    return code == 0 and all(word in said for word in words), " / ".join(found) or said[-200:]


@case("A1", "torchrun with two processes on a CPU, without --use_cpu")
def _(ground: Ground) -> Iterator[Outcome]:
    output = ground.new()
    flags = [each for each in ground.model if each != "--use_cpu"]
    command = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", 29711, "-m", "stepjepa", "train"]
    command += ["--train_file", ground.data, "--output_dir", output, *flags]
    told = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=300
    )
    run = json.loads((output / "run.json").read_text(encoding="utf-8")) if told.returncode == 0 else {}
    yield (
        run.get("machine", {}).get("processes") == 2,
        f"one model of {run.get('machine', {}).get('processes')} processes",
    )


@case("A2", "weights that are missing")
def _(ground: Ground) -> Iterator[Outcome]:
    folder = ground.weights(lambda tensors: tensors.pop("model.norm.weight"))
    for command in (
        ["evaluate", "--model_path", folder, "--test_file", ground.data, "--output_file", ground.new()],
        ["export", "--model_path", folder, "--output_dir", ground.new()],
        ["verify", "--model_name", folder, "--train_file", ground.data],
        ["train", "--model_name", folder, "--train_file", ground.data, "--output_dir", ground.new()],
    ):
        yield refused(ground.stepjepa(*command), "lack")


@case("A3", "weights that are not finite, made by training or found")
def _(ground: Ground) -> Iterator[Outcome]:
    output = ground.new()
    code, said = ground.train("--learning_rate", "inf", "--max_steps", 1, output=output)
    yield code != 0 and not (output / "model.safetensors").exists() and "Traceback" not in said, said.splitlines()[-1]
    folder = ground.weights(lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    command = ["--model_path", folder, "--test_file", ground.data, "--output_file", ground.new()]
    yield refused(ground.stepjepa("evaluate", *command), "not finite", "model.norm.weight")


@case("A3", "a flipped bit in the newest checkpoint")
def _(ground: Ground) -> Iterator[Outcome]:
    folder = ground.copy(ground.run)
    weights = folder / "checkpoint-2" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-5] ^= 1
    weights.write_bytes(changed)
    flags = ["--resume_from_checkpoint", "last", "--max_steps", 3, "--allow_changes"]
    yield right(ground.train(*flags, output=folder), "checkpoint-2", "skipped checkpoint")


@case("A4", "an evaluation on records that were trained on")
def _(ground: Ground) -> Iterator[Outcome]:
    command = ["--model_path", ground.run, "--test_file", ground.data, "--max_new_tokens", 2, "--output_file"]
    yield right(ground.stepjepa("evaluate", *command, ground.new()), "trained on")


@case("A5", "a resumed run with another objective; with another learning rate")
def _(ground: Ground) -> Iterator[Outcome]:
    first, second = ground.copy(ground.run), ground.copy(ground.run)
    resume = ["--max_steps", 3, "--resume_from_checkpoint"]
    yield refused(ground.train(*resume, first / "checkpoint-2", "--regular", output=first), "--allow_changes")
    flags = [*resume, second / "checkpoint-2", "--learning_rate", 0.5]
    yield right(ground.train(*flags, output=second), "learning_rate", "0.5")


@case("A6", "reasoning between think tags")
def _(ground: Ground) -> Iterator[Outcome]:
    raw = ground.file(json.dumps({"question": "2 + 2?", "deepseek_response": THINKING}) + "\n")
    output = ground.new()
    yield right(ground.stepjepa("prepare", "steps", "--input_file", raw, "--output_file", output), "think")
    output = ground.new()
    keep = ["prepare", "steps", "--input_file", raw, "--output_file", output, "--keep_thinking"]
    code, _ = ground.stepjepa(*keep)
    yield code == 0 and "Two." in output.read_text(encoding="utf-8"), "kept with --keep_thinking"


@case("A7", "templates that drop part of an answer, or write it in capitals")
def _(ground: Ground) -> Iterator[Outcome]:
    loop = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    for written in ("m.content.split('\n') | last", "m.content | upper"):
        template = ground.file(loop.replace("m.content }}", f"{written} }}}}"), ".jinja")
        yield refused(ground.train("--chat_template", template), "template")


@case("B8", "a template that raises; one that does not end")
def _(ground: Ground) -> Iterator[Outcome]:
    for text in ("{{ 1 / 0 }}", "{% for i in range(10 ** 9) %}{% set x = i %}{% endfor %}"):
        yield refused(ground.train("--chat_template", ground.file(text, ".jinja")), "template")


@case("B9", "odd values of flags")
def _(ground: Ground) -> Iterator[Outcome]:
    for flag, value in (
        ("--batch_size", "99999999999999999999"),
        ("--max_length", str(10**30)),
        ("--predictors", "1000000"),
        ("--lbd", "nan"),
        ("--max_steps", "1_000"),
        ("--train_file", "a\0b"),
        ("--train_file", "\udcff"),
        ("--resume_from_checkpoint", "checkpoint-²"),
    ):
        yield refused(ground.train(flag, value))


@case("B10", "an escape sequence in a file's name and in a record")
def _(ground: Ground) -> Iterator[Outcome]:
    for result in (
        ground.train(data=ground.folder / "a\x1b[2Jb.jsonl"),
        ground.train(data=ground.file('{"messages": [{"role": "\\u001b[2J", "content": "x"}]}\n')),
    ):
        yield refused(result)[0] and "\x1b" not in result[1], result[1].strip()


@case("B11", "a second training in the folder of one that runs")
def _(ground: Ground) -> Iterator[Outcome]:
    output = ground.new()
    with locked(output, "stepjepa train"):
        yield refused(ground.train(output=output), "process")


@case("B12", "--bf16 without an accelerator; a key twice; a tab; an unreachable hub")
def _(ground: Ground) -> Iterator[Outcome]:
    yield refused(ground.train("--bf16", "--use_cpu", "false"), "bf16")
    for text in ("lbd: 1\nlbd: 2\n", "train_file: a\n\tlbd: 1\n", "- lbd\n"):
        yield refused(ground.train("--config", ground.file(text, ".yaml")), ".yaml")
    start = time.monotonic()
    # Asked in a process of its own, since the library reads these once.
    more = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"}
    command = ["-m", "stepjepa", "inspect", "--train_file", ground.data, "--model_name", "nobody/nothing"]
    told = subprocess.run(
        [sys.executable, *map(str, command)], env=os.environ | more, capture_output=True, text=True, check=False
    )
    ok, line = refused((told.returncode, told.stderr), "hub")
    yield ok and time.monotonic() - start < 20, line


@case("B13", "checkpoints that do not fit on the disk")
def _(ground: Ground) -> Iterator[Outcome]:
    with mock.patch.object(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000)):
        yield refused(ground.train(), "checkpoints", "are free")


def try_all() -> list[tuple[str, str, bool, str]]:
    """Every case: its item, what was tried, whether all went as it should, and what was said, the last of it."""
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(Path(folder))
        for item, tried, act in CASES:
            outcomes = list(act(ground))
            wrong = [said for ok, said in outcomes if not ok]
            said = (wrong or [said for _, said in outcomes])[-1].replace(folder, "")
            found.append((item, f"{tried} ({len(outcomes)})" if len(outcomes) > 1 else tried, not wrong, said))
    torch.set_num_threads(threads)
    return found


def table(found: list[tuple[str, str, bool, str]]) -> str:
    """The cases as Markdown, with what was said where it is wrong."""
    lines = ["| item | what is tried | refused or right |", "|---|---|---|"]
    for item, tried, ok, said in found:
        line = said.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {item} | {tried} | {'yes' if ok else f'**no**: {line}'} |")
    return "\n".join(lines)


def main() -> int:
    """Try all, print the table."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--paste", type=Path, metavar="FILE", help="page that the table is written into")
    args = words.parse_args()
    found = try_all()
    print(table(found))
    if args.paste is not None:
        before, _, rest = args.paste.read_text(encoding="utf-8").partition(MARKS[0])
        args.paste.write_text(
            f"{before}{MARKS[0]}\n{table(found)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8"
        )
    return 0 if all(ok for _, _, ok, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
