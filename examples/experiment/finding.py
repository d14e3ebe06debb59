"""Answers and retrieval of the same models, as a table: from the files of retrieval.py and the figures of the grids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd
import retrieval

from stepjepa.study.statistics import PairedT, paired_t

FILE = "retrieval"
"""The file of figures with the answers of the same runs, and of rows beside this script; of ``synth``."""

PLAIN = "regular-1.35x"
FREE = ("nearest known question", "TF-IDF, characters", "TF-IDF, words")
HITS = "hits_at_1"


class Model(NamedTuple):
    """A row of the table: an arm, and by what candidates are ranked."""

    arm: str
    method: str
    words: str


MODELS = (
    *(Model("none", method, method) for method in FREE),
    Model("untrained", "best readout", "untrained, best readout"),
    Model("untrained", "ridge", "untrained, ridge map"),
    Model(PLAIN, "best readout", "plain, best readout"),
    Model(PLAIN, "ridge", "plain, ridge map"),
    Model("branched-cosine", "trained", "LM loss + cosine, `branched`"),
    Model("branched-cosine", "trained, ridge", "LM loss + cosine, `branched`, ridge map"),
    Model("infonce-alone", "trained", "InfoNCE alone, `separate`"),
    Model("infonce-alone", "trained, ridge", "InfoNCE alone, `separate`, ridge map"),
    Model("branched-infonce", "trained", "LM loss + InfoNCE, `branched`"),
    Model("branched-infonce", "trained, ridge", "LM loss + InfoNCE, `branched`, ridge map"),
    Model("separate-infonce", "trained", "LM loss + InfoNCE, `separate`"),
    Model("separate-infonce", "trained, ridge", "LM loss + InfoNCE, `separate`, ridge map"),
)


def joined(table: pd.DataFrame, file: str = FILE) -> pd.DataFrame:
    """The rows of a file of ``retrieval.py`` with ``right``, the share of right answers of the same run, in per cent.

    Args:
        table: of :func:`frame.read`.
        file: its name without suffix, and that of the figures of the same runs.
    """
    rows = retrieval.read(retrieval.FILE.with_stem(file))
    answers = table[table.file == file].set_index(["arm", "seed"]).right
    keys = zip(rows.arm, rows.seed, strict=True)
    shares_right = [answers.get(key, measured) for key, measured in zip(keys, rows.right, strict=True)]
    return rows.assign(right=shares_right)


def of_model(rows: pd.DataFrame, arm: str, method: str) -> pd.DataFrame:
    """The runs of a model by seed; empty if there is none yet."""
    of_arm = rows[(rows.arm == arm) & (rows.method == method)]
    return of_arm.set_index("seed").sort_index()


def difference(
    rows: pd.DataFrame, ours: tuple[str, str], theirs: tuple[str, str], column: str = HITS
) -> PairedT | None:
    """The t-test over the seeds of two models, each an arm and a method, in points; None without a common seed."""
    first, second = (of_model(rows, *each)[column].dropna() for each in (ours, theirs))
    seeds = first.index.intersection(second.index)
    return paired_t(list(first[seeds]), list(second[seeds])) if len(seeds) else None


def better_plain(rows: pd.DataFrame) -> tuple[str, str]:
    """The way of reading plain training, of ``best readout`` and ``ridge``, that finds more."""
    return PLAIN, max(("best readout", "ridge"), key=lambda method: of_model(rows, PLAIN, method)[HITS].mean())


def known_models(rows: pd.DataFrame) -> Iterator[tuple[Model, pd.DataFrame]]:
    """The models that have runs, in the order of the table."""
    for model in MODELS:
        runs = of_model(rows, model.arm, model.method)
        if len(runs):
            yield model, runs
