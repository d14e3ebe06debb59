"""Forests of a wanted size out of random tokens: what scaling and GPU measurements run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stepjepa.config import JepaConfig
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.layouts import Ids, Located, Placing
from stepjepa.forests.preparation import Prepared
from stepjepa.forests.sampler import ForestDataset


@dataclass(frozen=True)
class Shape:
    """The size of a record: a question, and an answer in steps of equal length; both are half of it.

    Attributes:
        length: tokens of the main text.
        steps: steps of the answer.
        vocabulary: token ids are drawn below it; the last ones of them are the predictor tokens.
    """

    length: int
    steps: int
    vocabulary: int

    def __post_init__(self) -> None:
        if self.steps < 1 or self.length < 4 * self.steps:
            raise ValueError(f"length: expected 4 or more tokens for each of {self.steps} steps, got {self.length}")

    def predictors(self, count: int) -> Ids:
        """Ids of the predictor tokens."""
        return np.arange(self.vocabulary - count, self.vocabulary, dtype=np.int32)


def make_forests(config: JepaConfig, shape: Shape, count: int, seed: int) -> list[Forest]:
    """Forests as the package lays them out, the answer labelled.

    Args:
        config: mode, layout and pairs; ``separate`` views have no template around them.
        shape: of every record.
        count: how many.
        seed: of the tokens; the same main texts for every ``config``.
    """
    assert config.predictors is not None
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, shape.vocabulary - 8, (count, shape.length)).astype(np.int32)
    placing = Placing(config, shape.predictors(config.predictors))
    half = shape.length // 2
    forests = []
    for line, row in enumerate(ids, start=1):
        labels = np.full(shape.length, IGNORE, np.int32)
        labels[half - 1 : -1] = row[half:]
        forests.append(placing.forest(row, labels, _pairs(config, row, half, shape.steps), line))
    return forests


def _pairs(config: JepaConfig, row: Ids, half: int, steps: int) -> list[tuple[Located, Located]]:
    if config.mode == "regular":
        return []
    if config.mode == "llm-jepa":
        in_main = config.layout == "branched"
        question = Located(row if in_main else row[:half], 0, half, in_main)
        return [(question, Located(row[half:], 0, len(row) - half, in_main=False))]
    edges = np.linspace(half, len(row), steps + 1).astype(int).tolist()
    views = [Located(row, start, end, in_main=True) for start, end in pairwise(edges)]
    pairs = list(pairwise(views))
    return pairs[:1] if config.pairs == "first" else pairs


def prepared(forests: list[Forest]) -> Prepared:
    """Forests as ``JepaTrainer`` takes them."""
    tokens = {"all": sum(map(len, forests)), "main": sum(forest.text_length for forest in forests)}
    counts = {"records": len(forests), "pairs": sum(len(forest.pairs) for forest in forests)}
    return Prepared(ForestDataset(forests), counts, tokens)
