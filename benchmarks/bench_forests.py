"""Forests of a wanted size out of random tokens: what scaling and GPU measurements run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepjepa.config import JepaConfig
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.layouts import Ids, Located, Mains, Pairs, Placing
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
    length, half = shape.length, shape.length // 2
    labels = np.full((count, length), IGNORE, np.int32)
    labels[:, half - 1 : -1] = ids[:, half:]
    texts = np.arange(count, dtype=np.int64) * length
    mains = Mains(texts, np.full(count, length), np.arange(1, count + 1))
    return list(placing.lay(ids.ravel(), labels.ravel(), mains, _pairs(config, texts, length, shape.steps)))


def _pairs(config: JepaConfig, texts: NDArray[np.int64], length: int, steps: int) -> Pairs:
    half = length // 2
    if config.mode == "regular":
        begins, ends = np.empty((2, 0), np.int64), np.empty((2, 0), np.int64)
    elif config.mode == "llm-jepa":
        begins, ends = np.asarray([[0], [half]]), np.asarray([[half], [length]])
    else:
        edges = np.linspace(half, length, steps + 1).astype(int)
        kept = 1 if config.pairs == "first" else steps - 1
        # Source and target of each pair: a step, and the next.
        begins = np.stack([edges[:-2], edges[1:-1]])[:, :kept]
        ends = np.stack([edges[1:-1], edges[2:]])[:, :kept]
    count = begins.shape[1]
    owner = np.repeat(np.arange(len(texts)), count)
    views = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        text, start, stop = texts[owner], np.tile(begin, len(texts)), np.tile(end, len(texts))
        in_main = config.mode == "step-jepa" or (number == 0 and config.layout == "branched")
        if in_main:
            view = Located(text, np.full(len(owner), length), start, stop, np.ones(len(owner), bool), 0 * owner)
        else:
            # A text of its own.
            size = stop - start
            view = Located(text + start, size, 0 * owner, size, np.zeros(len(owner), bool), 0 * owner)
        views.append(view)
    return Pairs(owner, *views)


def prepared(forests: list[Forest]) -> Prepared:
    """Forests as ``JepaTrainer`` takes them."""
    tokens = {"all": sum(map(len, forests)), "main": sum(forest.text_length for forest in forests)}
    counts = {"records": len(forests), "pairs": sum(len(forest.pairs) for forest in forests)}
    return Prepared(ForestDataset(forests), counts, tokens)
