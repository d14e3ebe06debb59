"""The arms of ``synth`` on those test records whose answer no training record has.

    python examples/experiment/unseen.py --data_dir ../shared/data/llm_jepa

writes which test records have an answer that some training record has, for the table to be made without the data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from run_figures import Figures

from data import answer
from stepjepa.experiments.statistics import spread
from stepjepa.files import existing_file, read_json_object, write_json

SEEN = Path(__file__).resolve().parent / "synth-seen.json"


def seen(train: Sequence[str], test: Sequence[str]) -> dict[str, list[int]]:
    """Numbers of the test records, from 0, whose answer, and which as a whole, are in the training file.

    Args:
        train: lines of the training file.
        test: lines of the test file.
    """
    answers, records = {answer(line) for line in train}, {_content(line) for line in train}
    return {
        "answer": [number for number, line in enumerate(test) if answer(line) in answers],
        "record": [number for number, line in enumerate(test) if _content(line) in records],
    }


def _content(line: str) -> str:
    return json.dumps(json.loads(line)["messages"])


def rows(figures: Sequence[Figures], seen_answers: Sequence[int]) -> list[list[str]]:
    """Heads, and for each arm its right answers on all records and on those with an answer that was not seen.

    Args:
        figures: runs on the test file.
        seen_answers: numbers of the others.
    """
    left_out = set(seen_answers)
    shares: dict[str, list[tuple[float, float]]] = {}
    for each in figures:
        right = each.run.examples["headline"] or []
        kept = [value for number, value in zip(each.run.indices, right, strict=True) if number not in left_out]
        shares.setdefault(each.label, []).append((sum(right) / len(right), sum(kept) / len(kept)))
    lines = [[label, *(_cell(list(column)) for column in zip(*both, strict=True))] for label, both in shares.items()]
    return [["arm", "all records", "answer not in the training file"], *lines]


def _cell(values: list[float]) -> str:
    found = spread(values)
    return f"{found.mean:.1%}" + ("" if found.std is None else f" ± {100 * found.std:.1f}")


def read_seen() -> list[int]:
    """What :func:`main` wrote."""
    found: list[int] = read_json_object(SEEN, "numbers of records", "run unseen.py")["answer"]
    return found


def main(argv: list[str] | None = None) -> int:
    """Write the numbers; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=Path("../shared/data/llm_jepa"), help="(%(default)s)")
    args = parser.parse_args(argv)
    train, test = (
        existing_file(args.data_dir / f"synth_{name}.jsonl", "data").read_text(encoding="utf-8").splitlines()
        for name in ("train", "test")
    )
    found = seen(train, test)
    write_json(SEEN, found)
    print(f"{SEEN}: {', '.join(f'{len(numbers)} by {what}' for what, numbers in found.items())} of {len(test)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
