"""The data of the experiment: training sets, validation cut from them, smaller shares of one, and texts to pretrain on.

    python examples/experiment/data.py --data_dir ../shared/data/llm_jepa --output_dir runs/experiment

Records of one expression stay together, so that no answer of the validation set is in the training set. The files of
the LLM-JEPA authors are read as they are; of TURK there is no published test set here, so one is cut from the training
set. The texts are sentences and expressions of both sets, one by one, so that nothing tells which belong together; none
is of a validation or test record. The step problems and the sums are generated. A file that is there is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from stepjepa.base.files import atomic_write, existing_file
from stepjepa.cli.main import main as stepjepa

VALIDATION = 1000
STEP_VALIDATION = 200
LIMITED = (250, 500, 2000)
SHARES = (2, 4, 8, 16)
# Two steps and small numbers: what a million parameters learn in one pass, and some get wrong. A third of the chains of
# equations that there are is held out; with more of them too few are left to learn from.
STEPS = {"train_size": 16000, "test_size": 500, "max_steps": 2, "max_quantity": 6, "max_amount": 20}
# With two steps there is one pair; problems of two and three tell all pairs from the first.
STEP_SETS = {"steps": STEPS, "steps-3": STEPS | {"max_steps": 3}}


def draw(text: str) -> bytes:
    """The place of a text in an order that has nothing to do with what it says."""
    return hashlib.sha256(text.encode()).digest()


def answer(line: str) -> str:
    """Return the assistant's answer of a record."""
    return str(json.loads(line)["messages"][-1]["content"])


def texts(lines: Iterable[str], held_out: Iterable[str]) -> list[str]:
    """Sentences and expressions as records of their own, for ``--plain --train_all``, which trains what the user says.

    Args:
        lines: records of a sentence and its expression.
        held_out: records whose expressions are left out, with every sentence that means one of them.

    Returns:
        Each text once, in an order that has nothing to do with which belong together.
    """
    hidden = {answer(line) for line in held_out}
    turns = [json.loads(line)["messages"][-2:] for line in lines if answer(line) not in hidden]
    distinct = sorted({turn["content"] for both in turns for turn in both}, key=draw)
    # Only what the user says is trained, but a record has an answer.
    records = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in distinct]
    return [json.dumps({"messages": messages}) for messages in records]


def wrong_partners(lines: Iterable[str]) -> list[str]:
    """Records whose views are the sentence and the expression of another record: a control of what the pairs say.

    What is trained as an answer stays right, and as many tokens are computed.
    """
    records = [json.loads(line) for line in lines]
    ring = sorted(range(len(records)), key=lambda number: draw(json.dumps(records[number])))
    partner = dict(zip(ring, [*ring[1:], ring[0]], strict=True))
    made = []
    for number, record in enumerate(records):
        text, code = record["messages"][-2]["content"], records[partner[number]]["messages"][-1]["content"]
        made.append(json.dumps(record | {"text": text, "code": code}))
    return made


def views_alone(lines: Iterable[str]) -> list[str]:
    """Every record, then its sentence and its expression as answers to one word: the views for the LM loss."""
    made = []
    for line in lines:
        texts = [turn["content"] for turn in json.loads(line)["messages"][-2:]]
        asked = [[{"role": "user", "content": "any"}, {"role": "assistant", "content": text}] for text in texts]
        made += [line, *(json.dumps({"messages": messages}) for messages in asked)]
    return made


def sums(*, digits: bool = True) -> list[str]:
    """All sums of two numbers below 100, as questions and answers; both orders of two numbers are neighbours.

    The order has nothing to do with the numbers, so that a part of the list is a random one.

    Args:
        digits: write digits one by one, so that a small tokenizer makes no tokens of whole numbers.
    """
    pairs = sorted(product(range(100), repeat=2), key=lambda pair: (draw(f"{min(pair)} {max(pair)}"), pair))
    made = []
    for one, other in pairs:
        question, answer = f"What is {one} + {other}?", str(one + other)
        if digits:
            question, answer = (" ".join(text) for text in (f"{one:02d}+{other:02d}", f"{one + other:03d}"))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append(json.dumps({"messages": turns}))
    return made


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
        print(f"{path} already exists")
        return
    records = list(lines)
    with atomic_write(path) as file:
        file.write("".join(f"{line}\n" for line in records))
    print(f"{path}: {len(records)} records")


def main(argv: list[str] | None = None) -> int:
    """Write all files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=Path("../shared/data/llm_jepa"), help="(%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/experiment"), help="(%(default)s)")
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    synth, turk, spider, synth_test = (
        existing_file(args.data_dir / name, "data").read_text(encoding="utf-8").splitlines()
        for name in ("synth_train.jsonl", "turk_train.jsonl", "spider_train.jsonl", "synth_test.jsonl")
    )
    synth_validation, synth_rest = cut(synth, VALIDATION)
    write(args.output_dir / "synth-validation.jsonl", synth_validation)
    write(args.output_dir / "synth-rest.jsonl", synth_rest)
    for size in LIMITED:
        write(args.output_dir / f"limited-{size}.jsonl", sorted(synth_rest, key=draw)[:size])
    write(args.output_dir / "synth-views-alone.jsonl", views_alone(synth))
    write(args.output_dir / "synth-wrong-partners.jsonl", wrong_partners(synth))
    for share in SHARES:
        write(args.output_dir / f"synth-1-{share}.jsonl", sorted(synth, key=draw)[: len(synth) // share])
    test, validation, rest = cut(turk, VALIDATION, VALIDATION)
    for name, lines in (("test", test), ("validation", validation), ("rest", rest), ("train", [*validation, *rest])):
        write(args.output_dir / f"turk-{name}.jsonl", lines)
    write(args.output_dir / "turk-2000.jsonl", sorted([*validation, *rest], key=draw)[:2000])
    write(args.output_dir / "spider-2000.jsonl", sorted(spider, key=draw)[:2000])
    held_out = 2 * VALIDATION
    for name, lines in (("sums", sums()), ("sums-asked", sums(digits=False))):
        parts = {"test": lines[:VALIDATION], "validation": lines[VALIDATION:held_out], "train": lines[held_out:]}
        for part, part_lines in parts.items():
            write(args.output_dir / f"{name}-{part}.jsonl", part_lines)
    write(args.output_dir / "sums-asked-2000.jsonl", sums(digits=False)[held_out : held_out + 2000])
    write(args.output_dir / "texts.jsonl", texts([*synth, *turk], [*synth_validation, *synth_test, *validation, *test]))
    for name, sizes in STEP_SETS.items():
        steps = args.output_dir / name
        flags = [word for size, value in sizes.items() for word in (f"--{size}", str(value))]
        if not steps.exists() and (code := stepjepa(["prepare", "stepmath", "--output_dir", str(steps), *flags])):
            return code
        problems = (steps / "test.jsonl").read_text(encoding="utf-8").splitlines()
        write(args.output_dir / f"{name}-validation.jsonl", problems[:STEP_VALIDATION])
        write(args.output_dir / f"{name}-test.jsonl", problems[STEP_VALIDATION:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
