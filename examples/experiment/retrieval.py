"""From the run folders of retrieval.yaml to retrieval.csv: how often each model finds the expression of a sentence.

    python examples/experiment/collect.py runs/experiment/retrieval     # answers, as of every other sweep
    python examples/experiment/retrieval.py runs/experiment/retrieval   # adds what is missing to retrieval.csv
    python examples/experiment/retrieval.py --baselines                 # what costs no training: TF-IDF and the like
    python examples/experiment/retrieval.py --data turk runs/experiment/retrieval-turk   # and retrieval-turk.csv
    python examples/experiment/retrieval.py --data smollm2 --layers 0 15 30 runs/experiment/retrieval-smollm2
    python examples/experiment/retrieval.py --data smollm2-turk --layers 0 15 30 runs/experiment/retrieval-smollm2-turk
    python examples/experiment/retrieval.py --data smollm2-spider --layers 0 15 30 SWEEP  # of smollm2-spider

The candidates are the distinct answers of the test file. ``method`` says by what they are ranked. ``trained``: by the
embeddings that training reads. For models without a JEPA objective, ``best readout`` of all layers, poolings and
layouts, centred or not, and ``ridge`` and ``canonical``, the same with a linear map that is fitted on the training
records but the last 1,000 (of SmolLM2, 300), by regression of targets on sources or by canonical correlations of both.
``classifier`` is a linear one of the answers, for data that have few. All are chosen by the mean reciprocal rank on
those last records. ``trained, ridge`` and ``trained, canonical`` are such maps behind the embeddings that training
reads. Runs of one seed also have ``trained, all answers``: every training answer is a candidate, too.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from collect import trained, trials
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from splits import SETS, SHARED, read_splits
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stepjepa.base.files import atomic_write
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.sources import read_records
from stepjepa.evaluation.output import RETRIEVAL_METRICS
from stepjepa.evaluation.retrieval import metrics, rank_targets, ranks_of_right
from stepjepa.evaluation.run import pair_embedder
from stepjepa.models.loading import load_for_inference, load_model
from stepjepa.objectives.linear_map import FITS, Fit, LinearMap, fit_linear_maps
from stepjepa.objectives.reading import embedding_config
from stepjepa.objectives.view_embeddings import ReadoutPlace, ViewEmbeddings
from stepjepa.store.record import trained_objective
from stepjepa.tasks.base import Task
from stepjepa.tasks.nl_rx import NlRxTask

FILE = Path(__file__).resolve().with_suffix(".csv")
EXPERIMENT = Path("runs/experiment")
SMOLLM2 = str(EXPERIMENT / "smollm2-135m-instruct")
ONE_SEED = "82"
CHOSEN = 1000
"""The last training records, by which readouts are chosen; a ridge map is fitted on those before them."""
WEAK, STEPS_OF_CLASSIFIER = 100.0, 300
"""Of logistic regression: inverse of its penalty, which is weak, and most steps."""
TRIED = 1000
"""Training records that the maps are fitted on while readouts are compared."""
LAYOUTS = ("separate", "branched")
METHODS = ("ridge", "canonical")
POOLINGS: tuple[Literal["last", "mean"], ...] = ("last", "mean")
Matrix = NDArray[np.float32]
Sides = tuple[Matrix, Matrix]
"""Sources and targets ``[N, D]`` of some records."""
Embed = Callable[[Sequence[Record], str], dict[tuple[int, str], Sides]]
"""Embeds records in a layout, at each of some layers and poolings."""


class Readout(NamedTuple):
    """A readout of embeddings, and whether the mean of each side is subtracted."""

    layout: str
    layer: int
    pooling: str
    centred: bool

    @property
    def place(self) -> tuple[int, str]:
        """Layer and pooling."""
        return self.layer, self.pooling

    @property
    def words(self) -> str:
        """The readout as text."""
        return f"{self.layout}, layer {self.layer}, {self.pooling}{', centred' if self.centred else ''}"


class Data(NamedTuple):
    """A data set, the model that is trained on it, and how many of its records are used."""

    name: str  # in splits.json, too, if it is there
    train: Path
    test: Path
    task: Task | None  # knows equal answers
    model: str = "preset:tiny"
    queries: int | None = None  # first records of the test file; None for all
    chosen: int = CHOSEN
    classes: bool = False  # training has every answer often, so that a classifier of them is a baseline, too
    word: str = r"(?u)\b\w\w+\b"  # a regular expression: what TF-IDF takes for a word


DATA = {
    "synth": Data("synth", *SETS["synth"], NlRxTask()),
    "turk": Data("turk", *SETS["turk"], NlRxTask()),
    # A quarter of the databases is at hand, so not all queries can be executed: only equal texts are the same query.
    "spider": Data("spider", SHARED / "spider_train.jsonl", SHARED / "spider_test.jsonl", None),
    "sums": Data(
        "sums", EXPERIMENT / "sums-train.jsonl", EXPERIMENT / "sums-test.jsonl", None, classes=True, word=r"\S+"
    ),
    "small": Data("synth", *SETS["synth"], NlRxTask(), "preset:small"),
    # The records that retrieval-smollm2.yaml, and the files of TURK and Spider beside it, train on and ask.
    "smollm2": Data("synth", EXPERIMENT / "synth-1-4.jsonl", SETS["synth"][1], NlRxTask(), SMOLLM2, 300, 300),
    "smollm2-turk": Data("turk", EXPERIMENT / "turk-2000.jsonl", SETS["turk"][1], NlRxTask(), SMOLLM2, 300, 300),
    "smollm2-sums": Data(
        "sums", EXPERIMENT / "sums-asked-2000.jsonl", EXPERIMENT / "sums-asked-test.jsonl", None, SMOLLM2, 300, 300
    ),
    "smollm2-spider": Data(
        "spider", EXPERIMENT / "spider-2000.jsonl", SHARED / "spider_test.jsonl", None, SMOLLM2, 300, 300
    ),
}


class Asked(NamedTuple):
    """The queries and candidates of the test file, and the names of equal answers."""

    data: Data
    records: list[Record]
    names: list[str | None]  # of each record, its language
    same: NDArray[np.int64]  # index of the first record with the same answer

    @property
    def candidates(self) -> NDArray[np.int64]:
        """The first record of each distinct answer."""
        return np.unique(self.same)


def asked(data: Data, records: Sequence[Record], *, equal: bool = False) -> Asked:
    """Describe the questions of a file; ``equal`` answers of other texts are named alike, which takes seconds."""
    first: dict[str, int] = {}
    same = [first.setdefault(record.answer, place) for place, record in enumerate(records)]
    names: list[str | None] = [None] * len(records)
    if equal and data.task is not None:
        names = data.task.answer_names(records)
    return Asked(data, list(records), names, np.asarray(same))


# -- rows of the file --------------------------------------------------------------------------------------------------


def row(about: dict[str, Any], source: Matrix, target: Matrix, test: Asked) -> dict[str, Any]:
    """Figures of one ranking, in per cent: of all queries, of equal texts alone, and by whether the language is new.

    Args:
        about: the columns that name the ranking.
        source: ``[N, D]`` embeddings of the questions of the test file.
        target: ``[N, D]`` embeddings of their answers.
        test: of :func:`asked`.
    """
    count = np.arange(len(test.records))
    views = ViewEmbeddings(source, target, count, np.ones_like(count), test.same)
    ranking = rank_targets(views, test.names, JepaConfig(mode="llm-jepa", predictors=0))
    values = metrics(ranking.ranks)
    of_text = metrics(ranking.of_text or ranking.ranks)["hits_at_1"]
    in_training = np.asarray(read_splits().get(test.data.name, {}).get("language", ()))
    figures = {name: values[name].mean() for name in RETRIEVAL_METRICS} | {"hits_at_1_of_text": of_text.mean()}
    if len(in_training) == len(count):
        figures |= {
            "hits_at_1_language_seen": of_text[in_training].mean(),
            "hits_at_1_language_new": of_text[~in_training].mean(),
        }
    return {**about, "queries": len(count), "candidates": ranking.candidates} | {k: 100 * v for k, v in figures.items()}


def beside_training_answers(
    about: dict[str, Any], views: ViewEmbeddings, known: ViewEmbeddings, test: Asked, train: Asked
) -> dict[str, Any]:
    """The same where the distinct training answers are candidates, too; only equal texts are right."""
    taken = {record.answer for record in test.records}
    others = [place for place in train.candidates if train.records[place].answer not in taken]
    candidates = np.concatenate([views.target[test.candidates], known.target[others]])
    place = {index: number for number, index in enumerate(test.candidates.tolist())}
    ranks = ranks_of_right(views.source, candidates, [[place[index]] for index in test.same.tolist()])
    figures = {name: 100 * values.mean() for name, values in metrics(ranks).items()}
    figures["hits_at_1_of_text"] = figures["hits_at_1"]
    return {**about, "queries": len(ranks), "candidates": len(candidates), **figures}


# -- readouts of models that were trained without pairs ----------------------------------------------------------------


def embed_everywhere(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    layout: str,
    layers: Sequence[int],
) -> dict[tuple[int, str], Sides]:
    """Embed both views of records in one pass, at every layer and with both poolings.

    Returns:
        By layer and pooling, the sources and targets.
    """
    config = JepaConfig(mode="llm-jepa", predictors=0, layout=layout, pooling="mean")
    places = [ReadoutPlace(layer, pooling) for layer, pooling in product(layers, POOLINGS)]
    embedder = pair_embedder(model, tokenizer, config, 64 if model.device.type == "cpu" else 256)
    return {place: (pairs.source, pairs.target) for place, pairs in embedder.at(records, places).items()}


def reciprocal_rank(source: Matrix, target: Matrix, test: Asked) -> float:
    """Mean reciprocal rank of equal texts among the distinct answers."""
    place = {index: number for number, index in enumerate(test.candidates.tolist())}
    ranks = ranks_of_right(source, target[test.candidates], [[place[index]] for index in test.same.tolist()])
    return float(metrics(ranks)["mrr"].mean())


def centre(matrix: Matrix, readout: Readout) -> Matrix:
    """Subtract the mean if the readout asks for it."""
    return matrix - matrix.mean(0) if readout.centred else matrix


def without_objective(
    about: dict[str, Any], embed: Embed, train: Sequence[Record], test: Asked
) -> list[dict[str, Any]]:
    """The rows of a model without a JEPA objective: its best readout, and its best readout with a ridge map.

    Args:
        about: the columns that name the model.
        embed: embeds records at the layers that are tried.
        train: the records that maps are fitted on and readouts are chosen by.
        test: of :func:`asked`.
    """
    fitted, chosen = train[: -test.data.chosen], asked(test.data, train[-test.data.chosen :])
    best: list[tuple[float, Readout]] = []
    mapped: list[tuple[float, Readout, Fit]] = []
    for layout in LAYOUTS:
        held_out, tried = embed(chosen.records, layout), embed(fitted[:TRIED], layout)
        for (layer, pooling), sides in held_out.items():
            for centred in (False, True):
                readout = Readout(layout, layer, pooling, centred)
                source, target = (centre(side, readout) for side in sides)
                best.append((reciprocal_rank(source, target, chosen), readout))
            readout = Readout(layout, layer, pooling, centred=False)
            for fit, linear_map in zip(FITS, fit_linear_maps(*tried[layer, pooling]), strict=True):
                mapped.append((reciprocal_rank(*mapped_sides(linear_map, sides), chosen), readout, fit))
    _, readout = max(best)
    source, target = (centre(side, readout) for side in embed(test.records, readout.layout)[readout.place])
    rows = [row({**about, "method": "best readout", "choice": readout.words}, source, target, test)]
    for method in METHODS:
        _, readout, fit = max(each for each in mapped if each[2].method == method)
        known, new = (embed(records, readout.layout)[readout.place] for records in (fitted, test.records))
        words = f"{readout.words}, penalty {fit.penalty:g}"
        (linear_map,) = fit_linear_maps(*known, [fit])
        rows.append(row({**about, "method": method, "choice": words}, *mapped_sides(linear_map, new), test))
    return [*rows, behind_classifier(about, embed, fitted, chosen, test)] if test.data.classes else rows


def behind_classifier(
    about: dict[str, Any], embed: Embed, train: Sequence[Record], chosen: Asked, test: Asked
) -> dict[str, Any]:
    """The row of the best readout with a linear classifier of the answers: logistic regression of the sources."""
    layout, answers = LAYOUTS[0], [record.answer for record in train]
    known, held_out, new = (embed(records, layout) for records in (train, chosen.records, test.records))
    best: tuple[float, tuple[int, str], Pipeline] | None = None
    for place, (sources, _) in known.items():
        classifier = make_pipeline(StandardScaler(), LogisticRegression(C=WEAK, max_iter=STEPS_OF_CLASSIFIER))
        with warnings.catch_warnings():
            # It is compared as it is after so many steps.
            warnings.simplefilter("ignore", ConvergenceWarning)
            classifier.fit(sources, answers)
        rank = reciprocal_rank(*classified(classifier, held_out[place][0], chosen), chosen)
        if best is None or rank > best[0]:
            best = rank, place, classifier
    assert best is not None
    _, place, classifier = best
    words = Readout(layout, *place, centred=False).words
    sides = classified(classifier, new[place][0], test)
    return row({**about, "method": "classifier", "choice": words}, *sides, test)


def classified(classifier: Pipeline, sources: Matrix, test: Asked) -> Sides:
    """Probabilities of all classes ``[N, K]`` for each source, and the class of each answer; zeros if it has none."""
    classes = np.asarray(classifier.classes_)
    own = np.asarray([record.answer for record in test.records])[:, None] == classes
    return classifier.predict_proba(sources).astype(np.float32), own.astype(np.float32)


def mapped_sides(linear_map: LinearMap, pairs: Sides) -> Sides:
    """Sources and targets ``[N, D]`` of pairs behind a map."""
    return linear_map(pairs[0], "source"), linear_map(pairs[1], "target")


def at_layers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, layers: Sequence[int] | None) -> Embed:
    """Return the function that embeds by a model at some layers; None for the token embeddings, 0, and each layer."""
    tried = layers or range(model.config.num_hidden_layers + 1)
    return lambda records, layout: embed_everywhere(model, tokenizer, records, layout, tried)


# -- models ------------------------------------------------------------------------------------------------------------


def of_run(
    folder: Path, about: dict[str, Any], train: Sequence[Record], test: Asked, layers: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The rows of a run folder; ``layers``, by default all, are tried where training reads none."""
    model, tokenizer = load_for_inference(folder, dtype="float32")
    if (trained_objective(folder) or {})["mode"] == "regular":
        return without_objective(about, at_layers(model, tokenizer, layers), train, test)
    config = embedding_config(trained_objective(folder))

    embed = pair_embedder(model, tokenizer, config, 64 if model.device.type == "cpu" else 256)
    views = embed(test.records)
    words = f"{config.layout}, {config.predictors} predictors"
    rows = [row({**about, "method": "trained", "choice": words}, views.source, views.target, test)]
    known = embed(train)
    parts = slice(None, -test.data.chosen), slice(-test.data.chosen, None)
    fitted, held_out = ((known.source[part], known.target[part]) for part in parts)
    chosen = asked(test.data, train[parts[1]])
    maps = [*fit_linear_maps(*fitted)]
    ranks = [reciprocal_rank(*mapped_sides(linear_map, held_out), chosen) for linear_map in maps]
    for method in METHODS:
        _, fit, linear_map = max(
            (each for each in zip(ranks, FITS, maps, strict=True) if each[1].method == method), key=itemgetter(0, 1)
        )
        sides = mapped_sides(linear_map, (views.source, views.target))
        words_of_map = f"{words}, penalty {fit.penalty:g}"
        rows.append(row({**about, "method": f"trained, {method}", "choice": words_of_map}, *sides, test))
    if about["seed"] == ONE_SEED:
        more = {**about, "method": "trained, all answers", "choice": words}
        rows.append(beside_training_answers(more, views, known, test, asked(test.data, train)))
    return rows


def without_model(train: Sequence[Record], test: Asked) -> list[dict[str, Any]]:
    """The rows of what needs no model."""
    questions = [[record.messages[-2]["content"] for record in part] for part in (train, test.records)]
    answers = [[record.answer for record in part] for part in (train, test.records)]
    about = {"seed": "", "choice": ""}
    rows = []
    for method, analyzer, sizes in (("TF-IDF, characters", "char", (2, 5)), ("TF-IDF, words", "word", (1, 2))):
        word = {"token_pattern": test.data.word} if analyzer == "word" else {}
        tfidf = TfidfVectorizer(analyzer=analyzer, ngram_range=sizes, **word)
        tfidf = tfidf.fit([*questions[0], *answers[0]])
        source, target = (tfidf.transform(part[1]).toarray().astype(np.float32) for part in (questions, answers))
        rows.append(row({**about, "arm": "none", "method": method}, source, target, test))
    # The answer of the nearest known question, and then the candidates by their likeness to it.
    tfidf = TfidfVectorizer(analyzer="char", ngram_range=(2, 5)).fit(questions[0])
    known, new = (tfidf.transform(part) for part in questions)
    nearest = [answers[0][place] for place in np.asarray((new @ known.T).argmax(1)).ravel()]
    likeness = TfidfVectorizer(analyzer="char", ngram_range=(1, 4), lowercase=False).fit(answers[0])
    source, target = (likeness.transform(part).toarray().astype(np.float32) for part in (nearest, answers[1]))
    answered = [replace_answer(*each) for each in zip(test.records, nearest, strict=True)]
    names: list[str | None] = [record.answer for record in (*test.records, *answered)]
    if test.data.task is not None:
        names = test.data.task.answer_names([*test.records, *answered])
    right = np.mean([names[place] == names[len(nearest) + place] for place in range(len(nearest))])
    named = {**about, "arm": "none", "method": "nearest known question", "right": 100 * right}
    return [*rows, row(named, source, target, test)]


def untrained(train: Sequence[Record], test: Asked, layers: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The rows of a model before training."""
    texts = (message["content"] for record in train for message in record.messages)
    model, tokenizer = load_model(test.data.model, texts=texts, predictors=0, seed=int(ONE_SEED))
    about = {"seed": ONE_SEED, "arm": "untrained"}
    return without_objective(about, at_layers(model, tokenizer, layers), train, test)


def replace_answer(record: Record, answer: str) -> Record:
    """The record with another answer."""
    return replace(record, messages=(*record.messages[:-1], {"role": "assistant", "content": answer}))


def read(file: Path | None = None) -> pd.DataFrame:
    """The rows that are there already, by default of retrieval.csv; figures in per cent."""
    return pd.read_csv(file or FILE, dtype={"seed": str}, keep_default_na=True).fillna({"seed": "", "choice": ""})


def main(argv: list[str] | None = None) -> int:
    """Add rows; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, nargs="?", metavar="SWEEP", help="folder of the sweep")
    parser.add_argument("--baselines", action="store_true", help="rank by what needs no training")
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help="layers to try, instead of all")
    parser.add_argument("--data", choices=list(DATA), default="synth", help="what the sweep trains on (synth)")
    parser.add_argument("--file", type=Path, help="(retrieval.csv; of other data retrieval-DATA.csv)")
    args = parser.parse_args(argv)
    data, of_data = DATA[args.data], FILE if args.data == "synth" else FILE.with_stem(f"{FILE.stem}-{args.data}")
    args.file = args.file or of_data
    rows = read(args.file).to_dict("records") if args.file.exists() else []
    train, test = read_records(data.train), asked(data, read_records(data.test)[: data.queries], equal=True)
    if args.baselines:
        rows = [each for each in rows if each["arm"] not in ("none", "untrained")]
        rows += [*without_model(train, test), *untrained(train, test, args.layers)]
        write(rows, args.file)
    for name, arm, seed in trials(args.sweep) if args.sweep else ():
        known = any((each["arm"], each["seed"]) == (arm, seed) for each in rows)
        if not known and trained(args.sweep / name):
            rows += of_run(args.sweep / name, {"arm": arm, "seed": seed}, train, test, args.layers)
            write(rows, args.file)
            print(f"{args.file}: {arm}, seed {seed}")
    return 0


def write(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write the file, sorted by arm, seed and method."""
    columns = ["arm", "seed", "method", "choice", "queries", "candidates", *RETRIEVAL_METRICS, "hits_at_1_of_text"]
    columns += ["hits_at_1_language_seen", "hits_at_1_language_new", "right"]
    table = pd.DataFrame(rows).reindex(columns=columns).sort_values(["arm", "seed", "method"])
    with atomic_write(file) as stream:
        table.to_csv(stream, index=False, float_format="%.6g", lineterminator="\n")


if __name__ == "__main__":
    raise SystemExit(main())
