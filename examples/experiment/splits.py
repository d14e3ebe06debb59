"""Parts of the test records by what they ask for, so that scores can be computed on each part.

    python examples/experiment/splits.py     # after data.py and untouched.py; writes splits.json

Of every test set, one digit for each record, 1 where it is so:
number: the right answer has a repetition count such as ``{3,}``, which has to be copied from the sentence;
language: an answer that was trained on describes the same lines, though its text may be another one;
shape: an answer that was trained on is the same but for its words, numbers and classes of characters;
trivial: the right answer describes every line, or none.
Of the untouched test only the first: no answer that was trained on describes the lines of one of its.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from data import answer
from stepjepa.base.files import existing_file, read_json_object, write_json
from stepjepa.tasks.regex_languages import Languages

FILE = Path(__file__).resolve().parent / "splits.json"
SHARED, MADE = Path("../shared/data/llm_jepa"), Path("runs/experiment")
SETS = {
    "synth": (SHARED / "synth_train.jsonl", SHARED / "synth_test.jsonl"),
    "turk": (MADE / "turk-train.jsonl", MADE / "turk-test.jsonl"),
}
_NUMBER = re.compile(r"\{\d")
_CONTENT = re.compile(r"\[[^\]]*\]|\{\d+(,\d*)?\}|(?<!\\)[a-z0-9]+")


def split(train: Iterable[str], test: Sequence[str]) -> dict[str, list[bool]]:
    """Return the properties of each test record.

    Args:
        train: right answers that were trained on.
        test: right answers of the test records.
    """
    languages = Languages()
    trained = list(train)
    known = {languages.of(text) for text in trained}
    shapes = {shape(text) for text in trained}
    trivial = {languages.of(".*"), languages.of("~(.*)")}
    return {
        "number": numbers(test),
        "language": [languages.of(text) in known for text in test],
        "shape": [shape(text) in shapes for text in test],
        "trivial": [languages.of(text) in trivial for text in test],
    }


def numbers(test: Iterable[str]) -> list[bool]:
    """Whether each right answer has a repetition count."""
    return [bool(_NUMBER.search(text)) for text in test]


def shape(expression: str) -> str:
    """An expression without its words, numbers and classes of characters."""
    return _CONTENT.sub("_", expression)


def read_splits() -> dict[str, dict[str, list[bool]]]:
    """Read the file that :func:`main` wrote, by test set."""
    content = read_json_object(FILE, "splits", "run splits.py")
    return {name: {what: [bit == "1" for bit in bits] for what, bits in each.items()} for name, each in content.items()}


def answers(file: Path) -> list[str]:
    """The right answers of a file of records."""
    return [answer(line) for line in existing_file(file, "data").read_text(encoding="utf-8").splitlines()]


def main(argv: list[str] | None = None) -> int:
    """Write the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    splits = {name: split(answers(train), answers(test)) for name, (train, test) in SETS.items()}
    splits["untouched"] = {"number": numbers(answers(MADE / "untouched.jsonl"))}
    write_json(FILE, {name: {what: _digits(bits) for what, bits in each.items()} for name, each in splits.items()})
    for name, each in splits.items():
        counts = {what: sum(bits) for what, bits in each.items()}
        print(f"{name}: {len(each['number'])} records, {json.dumps(counts)}")
    return 0


def _digits(bits: Sequence[bool]) -> str:
    return "".join(str(int(bit)) for bit in bits)


if __name__ == "__main__":
    raise SystemExit(main())
