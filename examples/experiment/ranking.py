"""Questions of a test file and their candidates, the embeddings that rank them, and the figures of a ranking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from splits import SETS, SHARED, read_splits

from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.evaluation.output import RETRIEVAL_METRICS
from stepjepa.evaluation.retrieval import metrics, rank_targets, ranks_of_right
from stepjepa.objectives.view_embeddings import ViewEmbeddings
from stepjepa.tasks.base import Task
from stepjepa.tasks.nl_rx import NlRxTask

EXPERIMENT = Path("runs/experiment")
SMOLLM2 = str(EXPERIMENT / "smollm2-135m-instruct")
CHOSEN = 1000
"""The last training records, by which readouts are chosen; a ridge map is fitted on those before them."""
LAYOUTS = ("separate", "branched")
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
    computed: bool = (
        False  # answers are computed, and training has each of them often: the baselines are not linear alone
    )
    wide: bool = False  # wide heads are a baseline, too
    word: str = r"(?u)\b\w\w+\b"  # a regular expression: what TF-IDF takes for a word


DATA = {
    "synth": Data("synth", *SETS["synth"], NlRxTask()),
    "turk": Data("turk", *SETS["turk"], NlRxTask()),
    "turk-128": Data("turk", *SETS["turk"], NlRxTask(), wide=True),
    # A quarter of the databases is at hand, so not all queries can be executed: only equal texts are the same query.
    "spider": Data("spider", SHARED / "spider_train.jsonl", SHARED / "spider_test.jsonl", None),
    "sums": Data(
        "sums", EXPERIMENT / "sums-train.jsonl", EXPERIMENT / "sums-test.jsonl", None, computed=True, word=r"\S+"
    ),
    "synth-128": Data("synth", *SETS["synth"], NlRxTask(), wide=True),
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


def reciprocal_rank(source: Matrix, target: Matrix, test: Asked) -> float:
    """Mean reciprocal rank of equal texts among the distinct answers."""
    place = {index: number for number, index in enumerate(test.candidates.tolist())}
    ranks = ranks_of_right(source, target[test.candidates], [[place[index]] for index in test.same.tolist()])
    return float(metrics(ranks)["mrr"].mean())
