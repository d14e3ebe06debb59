"""A test set of regular expressions that nobody has looked at: for claims, once the settings are chosen elsewhere.

    python examples/experiment/untouched.py            # writes runs/experiment/untouched.jsonl
    python examples/experiment/untouched.py --check    # exit code 1 where it is not the file of untouched.json

New records of the grammar that NL-RX was made from. None has an answer that describes the same lines as an answer of
synth's training or test file; nearly three of four generated ones have, the short ones above all. So the records are
drawn to have the shares of numbers and of lengths of the published test file, as far as there are enough of them, and
weighted to have its shares of operators. ``untouched.json`` holds the hash of the file, its distributions and the
weights.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

from splits import SETS, answers

from data import answer, draw, write
from stepjepa.base.files import fingerprint, read_json_object, write_json
from stepjepa.cli.main import main as stepjepa
from stepjepa.tasks.regex_languages import Languages

RECORD = Path(__file__).resolve().with_suffix(".json")
GENERATED, SEED, WANTED = 40_000, 20261123, 4_000
OPERATORS = ("&", "|", "~", "+", "*", "\\b", "{")
# Records are weighted by which of these their answers have; with "*", too, 1,100 of them would count and not 1,500.
WEIGHTED_BY = ("&", "|", "~", "\\b", "{")


def read_weights() -> list[float]:
    """The weight of each record of the file, as :func:`main` wrote it."""
    return [float(each) for each in read_json_object(RECORD, "record", "run untouched.py")["weights"].split()]


def new_records(lines: Sequence[str], known: Sequence[str]) -> list[str]:
    """Records whose answer describes other lines than every known one does, and than that of every record before."""
    languages = Languages()
    taken = {languages.of(text) for text in known}
    new = []
    for line in lines:
        language = languages.of(answer(line))
        if language not in taken:
            taken.add(language)
            new.append(line)
    return new


def drawn(lines: Sequence[str], like: Sequence[str], wanted: int) -> list[str]:
    """Records with the shares of numbers and lengths that other answers have; fewer where there are not enough.

    Args:
        lines: records to draw from.
        like: answers whose shares are taken.
        wanted: how many.
    """
    cuts = quantiles(map(len, like), n=5)

    def kind(text: str) -> tuple[bool, int]:
        return "{" in text, sum(len(text) > cut for cut in cuts)

    shares = Counter(map(kind, like))
    waiting = {each: round(wanted * count / len(like)) for each, count in shares.items()}
    chosen = []
    for line in sorted(lines, key=draw):
        each = kind(answer(line))
        if waiting.get(each, 0) > 0:
            waiting[each] -= 1
            chosen.append(line)
    return chosen


def weights(texts: Sequence[str], like: Sequence[str]) -> list[float]:
    """A weight for each answer, such that every combination of operators has the share that it has in other answers.

    The mean weight is 1. Combinations that ``texts`` lacks are left out.
    """

    def kind(text: str) -> tuple[bool, ...]:
        return tuple(sign in text for sign in WEIGHTED_BY)

    here, there = Counter(map(kind, texts)), Counter(map(kind, like))
    common = sum(count for each, count in there.items() if here[each])
    return [round(there[kind(text)] / common * len(texts) / here[kind(text)], 4) for text in texts]


def described(texts: Sequence[str], weights: Sequence[float]) -> dict[str, object]:
    """Describe the lengths of answers and the share that has each operator, also weighted."""
    total = sum(weights)
    shares = {
        sign: round(sum(weight for weight, text in zip(weights, texts, strict=True) if sign in text) / total, 3)
        for sign in OPERATORS
    }
    return {
        "records": len(texts),
        "effective records": round(total**2 / sum(weight**2 for weight in weights)),
        "deciles of length": [round(cut, 1) for cut in quantiles(map(len, texts), n=10)],
        "share with": shares,
    }


def main(argv: list[str] | None = None) -> int:
    """Write or check the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/experiment"), help="(%(default)s)")
    parser.add_argument("--check", action="store_true", help="only compare the file with its hash")
    args = parser.parse_args(argv)
    file = args.output_dir / "untouched.jsonl"
    there = file.exists() and RECORD.exists() and fingerprint(file) == read_json_object(RECORD, "record", "")["sha256"]
    if args.check:
        return int(not there)
    train, test = map(answers, SETS["synth"])
    if not there:
        pool = args.output_dir / "untouched-pool.jsonl"
        flags = ["--size", str(GENERATED), "--seed", str(SEED), "--output_file", str(pool)]
        if not pool.exists() and (code := stepjepa(["prepare", "nl-rx", *flags])):
            return code
        # Takes half an hour: the languages of 50,000 expressions.
        candidates = new_records(pool.read_text(encoding="utf-8").splitlines(), [*train, *test])
        write(file, drawn(candidates, test, WANTED))
    untouched = answers(file)
    weighted = weights(untouched, test)
    about = {
        "untouched": described(untouched, [1] * len(untouched)),
        "weighted": described(untouched, weighted),
        "published": described(test, [1] * len(test)),
    }
    write_json(RECORD, {"sha256": fingerprint(file), **about, "weights": " ".join(map(str, weighted))})
    print(json.dumps(about))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
