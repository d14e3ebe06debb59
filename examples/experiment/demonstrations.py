"""Does retrieval help answers? Known pairs before the question, as demonstrations: the nearest ones, or any.

    python examples/experiment/demonstrations.py --model_path runs/experiment/retrieval/separate-infonce/seed82 \\
        --answering_model $(python examples/smollm2.py | tail -1)

writes demonstrations.csv, and questions and answers to ``--output_dir``. The answering model was not trained on the
data: a pretrained chat model, which needs demonstrations to know what is asked for. The first test records of ``synth``
are asked, each with the same number of records of the training file before it as earlier turns of the chat, the nearest
last. ``way`` says which records:

- ``none``: the question alone.
- ``any``: drawn at random, anew for each question.
- ``TF-IDF``: those whose questions are most like it, by their parts of 2 to 5 characters.
- ``embeddings``: those whose *answers* are nearest to the question by the embeddings of ``--model_path``, a run that
  was trained with InfoNCE.

``right`` is the share of right answers in per cent. ``a demonstration is right``: for how many questions one of the
demonstrations has a right answer already, which can be copied; ``right elsewhere`` is the share among the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer
from splits import SETS

from stepjepa import Jepa, Record, evaluate, read_records
from stepjepa.base.files import atomic_write, read_jsonl, write_jsonl
from stepjepa.tasks.nl_rx import NlRxTask

FILE = Path(__file__).resolve().with_suffix(".csv")
SEED = 82


@dataclass(frozen=True)
class Row:
    """The figures of one way to choose demonstrations; shares in per cent."""

    way: str
    demonstrations: int
    questions: int
    right: float
    demonstration_right: float
    right_elsewhere: float | None


def question_of(record: Record) -> str:
    """The user's last message."""
    return record.messages[-2]["content"]


def nearest_by_text(known: Sequence[Record], asked: Sequence[Record], count: int) -> list[list[int]]:
    """Indices of the known records whose questions are most like each question, the most alike first."""
    tfidf = TfidfVectorizer(analyzer="char", ngram_range=(2, 5)).fit(map(question_of, known))
    old, new = (tfidf.transform(map(question_of, part)) for part in (known, asked))
    ranked: list[list[int]] = np.argsort(-(new @ old.T).toarray(), axis=1, kind="stable")[:, :count].tolist()
    return ranked


def nearest_by_embedding(jepa: Jepa, known: Sequence[Record], asked: Sequence[Record], count: int) -> list[list[int]]:
    """Indices of the known records whose answers are nearest to each question, the nearest first.

    Of several records with one answer the first is taken.
    """
    first: dict[str, int] = {}
    for place, record in enumerate(known):
        first.setdefault(record.answer, place)
    hits = jepa.index(list(first)).search(list(map(question_of, asked)), k=count)
    return [[first[hit.text] for hit in row] for row in hits]


def with_demonstrations(record: Record, shown: Sequence[Record]) -> dict[str, object]:
    """The record with other records' questions and answers as earlier turns, the last of ``shown`` first."""
    *before, question, answer = record.messages
    turns = [message for each in reversed(shown) for message in each.messages[-2:]]
    return {"messages": [*before, *turns, question, answer]}


def measure(
    way: str, shown: Sequence[Sequence[Record]], asked: Sequence[Record], folder: Path, answering_model: str
) -> Row:
    """Ask every question behind its demonstrations, and score the answers."""
    test_file, output_file = folder / f"{way}.jsonl", folder / f"{way}-answers.jsonl"
    write_jsonl(test_file, map(with_demonstrations, asked, shown))
    evaluate(answering_model, test_file, output_file=output_file, task="nl-rx", max_new_tokens=64, batch_size=20)
    right = np.array([bool(line["scores"]["equivalent"]) for _, line in read_jsonl(output_file)])
    # Demonstrations and the right answers, named by the lines that they match.
    flat = [each for row in shown for each in row]
    names = NlRxTask().answer_names([*asked, *flat])
    others: Iterator[str | None] = iter(names[len(asked) :])
    known = np.array([truth in [next(others) for _ in row] for truth, row in zip(names, shown, strict=False)])
    return Row(
        way=way,
        demonstrations=len(shown[0]),
        questions=len(asked),
        right=100 * right.mean(),
        demonstration_right=100 * known.mean(),
        right_elsewhere=100 * right[~known].mean() if not known.all() else None,
    )


def main(argv: list[str] | None = None) -> int:
    """Measure all ways and write the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", type=Path, required=True, help="a run folder, by whose embeddings is searched")
    parser.add_argument("--answering_model", required=True, help="folder of the chat model that answers")
    parser.add_argument("--questions", type=int, default=100, help="of the test file, the first ones (100)")
    parser.add_argument("--demonstrations", type=int, default=4, help="before each question (4)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/experiment/demonstrations"), help="(%(default)s)")
    parser.add_argument("--file", type=Path, default=FILE, help="(demonstrations.csv)")
    args = parser.parse_args(argv)
    train_file, test_file = SETS["synth"]
    known, asked, count = read_records(train_file), read_records(test_file)[: args.questions], args.demonstrations
    draw = np.random.default_rng(SEED)
    chosen = {
        "none": [[] for _ in asked],
        "any": [draw.choice(len(known), count, replace=False).tolist() for _ in asked],
        "TF-IDF": nearest_by_text(known, asked, count),
        "embeddings": nearest_by_embedding(Jepa.from_pretrained(args.model_path), known, asked, count),
    }
    rows = []
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for way, places in chosen.items():
        shown = [[known[place] for place in row] for row in places]
        rows.append(measure(way, shown, asked, args.output_dir, args.answering_model))
        print(rows[-1], flush=True)
    with atomic_write(args.file) as stream:
        pd.DataFrame(map(asdict, rows)).to_csv(stream, index=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
