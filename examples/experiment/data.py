"""The data of the experiment: training sets, validation cut from them, and smaller shares of one.

    python examples/experiment/data.py --data_dir ../shared/data/llm_jepa --output_dir runs/experiment

Records of one expression stay together, so that no answer of the validation set is in the training set. The files of
the LLM-JEPA authors are read as they are; of TURK there is no published test set here, so one is cut from the training
set. The step problems are generated. A file that is there is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from stepjepa.cli import main as stepjepa
from stepjepa.files import atomic_write, existing_file

VALIDATION = 1000
SHARES = (2, 4, 8, 16)
STEP_PROBLEMS = 4000
STEP_TEST = 1000


def draw(text: str) -> bytes:
    """The place of a text in an order that has nothing to do with what it says."""
    return hashlib.sha256(text.encode()).digest()


def answer(line: str) -> str:
    """What the assistant says in a record."""
    return str(json.loads(line)["messages"][-1]["content"])


def cut(lines: list[str], *sizes: int) -> list[list[str]]:
    """Cut sets off some records, answers kept together.

    Args:
        lines: one record each.
        sizes: of the sets, at least; a set is full once it has as many records.

    Returns:
        The sets, and what is left as the last of them; each in the order of ``lines``.
    """
    of_answer: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        of_answer.setdefault(answer(line), []).append(number)
    parts: list[list[int]] = [[] for _ in range(len(sizes) + 1)]
    for text in sorted(of_answer, key=draw):
        place = next((i for i, size in enumerate(sizes) if len(parts[i]) < size), len(sizes))
        parts[place].extend(of_answer[text])
    return [[lines[number] for number in sorted(part)] for part in parts]


def write(path: Path, lines: Iterable[str]) -> None:
    """Write records, unless the file is there."""
    if path.exists():
        print(f"{path} is there")
        return
    texts = list(lines)
    with atomic_write(path) as file:
        file.write("".join(f"{line}\n" for line in texts))
    print(f"{path}: {len(texts)} records")


def main(argv: list[str] | None = None) -> int:
    """Write all files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=Path("../shared/data/llm_jepa"), help="(%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/experiment"), help="(%(default)s)")
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    synth, turk = (
        existing_file(args.data_dir / f"{name}_train.jsonl", "data").read_text(encoding="utf-8").splitlines()
        for name in ("synth", "turk")
    )
    validation, rest = cut(synth, VALIDATION)
    write(args.output_dir / "synth-validation.jsonl", validation)
    write(args.output_dir / "synth-rest.jsonl", rest)
    for share in SHARES:
        write(args.output_dir / f"synth-1-{share}.jsonl", sorted(synth, key=draw)[: len(synth) // share])
    test, validation, rest = cut(turk, VALIDATION, VALIDATION)
    for name, lines in (("test", test), ("validation", validation), ("rest", rest), ("train", [*validation, *rest])):
        write(args.output_dir / f"turk-{name}.jsonl", lines)
    steps = args.output_dir / "steps"
    if steps.exists():
        print(f"{steps} is there")
        return 0
    sizes = ["--train_size", str(STEP_PROBLEMS), "--test_size", str(STEP_TEST)]
    return stepjepa(["prepare", "stepmath", "--output_dir", str(steps), *sizes])


if __name__ == "__main__":
    raise SystemExit(main())
