"""From run folders to word_order.csv: does an embedding say in which order the parts of a text stand?

    python examples/experiment/word_order.py --data synth --baselines runs/experiment/retrieval
    python examples/experiment/word_order.py --data turk --baselines

"Lines with a vowel before a number" and "lines with a number before a vowel" have the same words, and their expressions
the same tokens. The *twin* of an answer is the answer with two of its parts swapped, of the same tokens and another
language. Queries are the questions whose answer has a twin; candidates are the distinct answers of the test file and
the twins. What only knows which tokens stand in a text has half of the answers nearer to the question than their twins.

``method`` is that of retrieval.csv. Layer, pooling, layout and fit of a map are chosen by the mean reciprocal rank of
the last training records, among their answers and *their* twins. ``--baselines`` adds what needs no training.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from collect import trained, trials
from numpy.typing import NDArray
from ranking import DATA, LAYOUTS, Data, Embed, Matrix, Readout, Sides
from retrieval import METHODS, ONE_SEED, TRIED, at_layers, replace_answer
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import PreTrainedTokenizerBase

from stepjepa.base.files import atomic_write
from stepjepa.data.record import Record
from stepjepa.data.sources import read_records
from stepjepa.evaluation.retrieval import metrics, ranks_of_right
from stepjepa.evaluation.run import pair_embedder
from stepjepa.models.loading import load_for_inference, load_model
from stepjepa.objectives.fitted import sides_behind
from stepjepa.objectives.linear_map import FITS, Fit, fit_linear_maps
from stepjepa.objectives.reading import embedding_config
from stepjepa.store.record import trained_objective

FILE = Path(__file__).resolve().with_suffix(".csv")
COLUMNS = ["data", "arm", "seed", "method", "choice", "queries", "candidates", "nearer_than_twin", "hits_at_1", "mrr"]
PART = re.compile(r"\[[^\]]*\]|dog|truck|ring|lake|\{\d+,\d*\}")
"""What is swapped in an expression of NL-RX: classes of characters and words, or numbers of times."""
TFIDF = {"TF-IDF, characters": ("char", (2, 5)), "TF-IDF, words": ("word", (1, 2))}


def swaps(expression: str) -> Iterator[str]:
    """The expressions that come of swapping two different parts; a number of times is swapped with another one."""
    for one, other in combinations(PART.finditer(expression), 2):
        if one.group() != other.group() and (one.group()[0] == "{") == (other.group()[0] == "{"):
            between = expression[one.end() : other.start()]
            yield expression[: one.start()] + other.group() + between + one.group() + expression[other.end() :]


class Asked(NamedTuple):
    """Queries whose answers have a twin, and the candidates, as places in ``records`` and ``candidates``."""

    records: list[Record]  # of a file, and behind them one for each twin
    queries: NDArray[np.int64]  # [Q] records whose answer has a twin
    twins: NDArray[np.int64]  # [Q] records of these twins
    candidates: NDArray[np.int64]  # [C] the first record of each distinct answer
    right: list[list[int]]  # for each query the candidates with its language


def with_twins(data: Data, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> Asked:
    """Find the first twin of each answer, and describe queries and candidates; ValueError if languages are unknown."""
    if data.task is None:
        raise ValueError(f"data: expected one whose task names equal answers, got {data.name}")
    swapped = [(place, replace_answer(each, twin)) for place, each in enumerate(records) for twin in swaps(each.answer)]
    tried = [*records, *(record for _, record in swapped)]
    names = [name or each.answer for name, each in zip(data.task.answer_names(tried), tried, strict=True)]
    tokens = [Counter(tokenizer(each.answer, add_special_tokens=False).input_ids) for each in tried]
    first: dict[int, int] = {}
    for number, (place, _) in enumerate(swapped, len(records)):
        if names[number] != names[place] and tokens[number] == tokens[place]:
            first.setdefault(place, number)
    kept = [*range(len(records)), *first.values()]
    distinct: dict[str, int] = {}
    for place, number in enumerate(kept):
        distinct.setdefault(tried[number].answer, place)
    of_language: dict[str, list[int]] = {}
    for candidate, place in enumerate(distinct.values()):
        of_language.setdefault(names[kept[place]], []).append(candidate)
    return Asked(
        [tried[number] for number in kept],
        np.asarray([*first]),
        np.arange(len(records), len(kept)),
        np.asarray([*distinct.values()]),
        [of_language[names[place]] for place in first],
    )


def figures(source: Matrix, target: Matrix, test: Asked) -> dict[str, float]:
    """Hits at 1, mean reciprocal rank, and how many answers are nearer than their twins, in per cent; ties are halves.

    Args:
        source: ``[N, D]`` embeddings of the questions of all records.
        target: ``[N, D]`` embeddings of their answers.
        test: of :func:`with_twins`.
    """
    values = metrics(ranks_of_right(source[test.queries], target[test.candidates], test.right))
    sides = source[test.queries], target[test.queries], target[test.twins]
    asked, own, twin = (side / np.linalg.norm(side, axis=1, keepdims=True).clip(1e-12) for side in sides)
    # Vectors that differ in rounding alone are equally near.
    margin = np.round(((own - twin) * asked).sum(1), 5)
    nearer = (np.sign(margin) + 1) / 2
    means = {name: 100 * float(values[name].mean()) for name in ("hits_at_1", "mrr")}
    return {"nearer_than_twin": 100 * float(nearer.mean()), **means}


class Study(NamedTuple):
    """The records that maps are fitted on, those that choose among maps, and those that are asked."""

    fitted: Sequence[Record]
    chosen: Asked
    test: Asked

    @classmethod
    def of(
        cls, data: Data, train: Sequence[Record], test: Sequence[Record], tokenizer: PreTrainedTokenizerBase
    ) -> Study:
        """Hold the last training records out, as in retrieval.py."""
        asked = (with_twins(data, part, tokenizer) for part in (train[-data.chosen :], test))
        return cls(train[: -data.chosen], *asked)

    def row(self, about: dict[str, Any], sides: Sides) -> dict[str, Any]:
        """A row of the file: sources and targets of the records of the test."""
        sizes = {"queries": len(self.test.queries), "candidates": len(self.test.candidates)}
        return {**about, **sizes, **figures(*sides, self.test)}

    def behind_maps(self, about: dict[str, Any], embed: Embed, layouts: Sequence[str]) -> list[dict[str, Any]]:
        """The rows of the best map of each method, over layouts and the places that are embedded."""
        tried: list[tuple[float, Readout, Fit]] = []
        for layout in layouts:
            held_out, known = embed(self.chosen.records, layout), embed(self.fitted[:TRIED], layout)
            for (layer, pooling), sides in held_out.items():
                for fit, linear_map in zip(FITS, fit_linear_maps(*known[layer, pooling]), strict=True):
                    rank = figures(*sides_behind(linear_map, *sides), self.chosen)["mrr"]
                    tried.append((rank, Readout(layout, layer, pooling, centred=False), fit))
        rows = []
        for method in METHODS:
            _, readout, fit = max(each for each in tried if each[2].method == method)
            fitted, new = (
                embed(records, readout.layout)[readout.place] for records in (self.fitted, self.test.records)
            )
            (linear_map,) = fit_linear_maps(*fitted, [fit])
            words = f"{readout.words}, penalty {fit.penalty:g}"
            rows.append(self.row({**about, "method": method, "choice": words}, sides_behind(linear_map, *new)))
        return rows


def of_run(
    folder: Path, about: dict[str, Any], data: Data, records: tuple[Sequence[Record], Sequence[Record]]
) -> list[dict[str, Any]]:
    """The rows of a run folder; ``records`` are those of training and test."""
    model, tokenizer = load_for_inference(folder, dtype="float32")
    train, test = records
    study, objective = Study.of(data, train, test, tokenizer), trained_objective(folder)
    if (objective or {})["mode"] == "regular":
        return study.behind_maps(about, at_layers(model, tokenizer, None), LAYOUTS)
    config = embedding_config(objective)
    layout, embedder = str(config.layout), pair_embedder(model, tokenizer, config, 64)

    def embed(records: Sequence[Record], _: str) -> dict[tuple[int, str], Sides]:
        views = embedder(records)
        return {(config.jepa_layer, config.pooling): (views.source, views.target)}

    (sides,) = embed(study.test.records, layout).values()
    trained_row = study.row(
        {**about, "method": "trained", "choice": f"{layout}, {config.predictors} predictors"}, sides
    )
    rows = study.behind_maps(about, embed, [layout])
    return [trained_row, *({**each, "method": f"trained, {each['method']}"} for each in rows)]


def baselines(data: Data, train: Sequence[Record], test: Sequence[Record]) -> list[dict[str, Any]]:
    """The rows of the model before any training, and of likeness by characters and by words."""
    texts = (message["content"] for record in train for message in record.messages)
    model, tokenizer = load_model(data.model, texts=texts, predictors=0, seed=int(ONE_SEED))
    study = Study.of(data, train, test, tokenizer)
    about = {"data": data.name, "arm": "untrained", "seed": ONE_SEED}
    rows = study.behind_maps(about, at_layers(model, tokenizer, None), LAYOUTS)
    known = [text for record in train for text in (record.messages[-2]["content"], record.answer)]
    asked = [
        [each.messages[-2]["content"] for each in study.test.records],
        [each.answer for each in study.test.records],
    ]
    for method, (analyzer, sizes) in TFIDF.items():
        tfidf = TfidfVectorizer(analyzer=analyzer, ngram_range=sizes).fit(known)
        source, target = (tfidf.transform(part).toarray().astype(np.float32) for part in asked)
        named = {"data": data.name, "arm": "none", "seed": "", "method": method, "choice": ""}
        rows.append(study.row(named, (source, target)))
    return rows


def read(file: Path = FILE) -> pd.DataFrame:
    """The rows that are there already; figures in per cent."""
    return pd.read_csv(file, dtype={"seed": str}).fillna({"seed": "", "choice": ""})


def main(argv: list[str] | None = None) -> int:
    """Add rows; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, nargs="?", metavar="SWEEP", help="folder of the sweep")
    parser.add_argument("--baselines", action="store_true", help="add what needs no training")
    parser.add_argument("--data", choices=("synth", "turk"), default="synth", help="what the sweep trains on (synth)")
    parser.add_argument("--file", type=Path, default=FILE, help="(word_order.csv)")
    args = parser.parse_args(argv)
    data = DATA[args.data]
    rows: list[dict[str, Any]] = [*read(args.file).to_dict("records")] if args.file.exists() else []
    records = read_records(data.train), read_records(data.test)
    if args.baselines:
        rows = [each for each in rows if each["data"] != args.data or each["arm"] not in ("none", "untrained")]
        rows += baselines(data, *records)
        write(rows, args.file)
    for name, arm, seed in trials(args.sweep) if args.sweep else ():
        about = {"data": args.data, "arm": arm, "seed": seed}
        known = any(about.items() <= each.items() for each in rows)
        if not known and trained(args.sweep / name):
            rows += of_run(args.sweep / name, about, data, records)
            write(rows, args.file)
            print(f"{args.file}: {arm}, seed {seed}", flush=True)
    return 0


def write(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write the file, sorted by data, arm, seed and method."""
    table = pd.DataFrame(rows).reindex(columns=COLUMNS).sort_values(COLUMNS[:4])
    with atomic_write(file) as stream:
        table.to_csv(stream, index=False, float_format="%.6g", lineterminator="\n")


if __name__ == "__main__":
    raise SystemExit(main())
