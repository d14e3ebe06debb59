"""Baselines behind a model as it is: projection heads, and a linear classifier of answers that are computed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from ranking import LAYOUTS, Asked, Embed, Matrix, Readout, Sides, asked, reciprocal_rank, row
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from stepjepa.data.record import Record
from stepjepa.objectives.fitted import sides_behind
from stepjepa.objectives.head_training import EPOCHS, fit_heads
from stepjepa.objectives.projection_heads import ProjectionHeads

EPOCHS_TRIED = 10
"""Of the heads that choose where embeddings are read; there are thousands of pairs."""
WIDE, DECAY_OF_WIDE = 2048, 0.3
"""Width and weight decay of larger heads; of nine settings those with the best rank of held-out pairs, one seed."""
WEAK, STEPS_OF_CLASSIFIER = 100.0, 300
"""Of logistic regression: inverse of its penalty, which is weak, and most steps."""


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


def behind_wide_heads(
    about: dict[str, Any], embed: Embed, train: Sequence[Record], chosen: Asked, test: Asked
) -> dict[str, Any]:
    """The row of larger projection heads, which read the means of all layers at once."""
    layout, same = LAYOUTS[0], asked(test.data, train).same
    known, held_out, new = (_all_means(embed(records, layout)) for records in (train, chosen.records, test.records))
    _, heads = fit_heads(
        *known,
        same,
        lambda heads: reciprocal_rank(*sides_behind(heads, *held_out), chosen),
        epochs=EPOCHS,
        width=WIDE,
        weight_decay=DECAY_OF_WIDE,
    )
    words = f"{layout}, all layers, mean, {heads.epochs} epochs"
    return row({**about, "method": "wide heads", "choice": words}, *sides_behind(heads, *new), test)


def _all_means(sides: dict[tuple[int, str], Sides]) -> Sides:
    """Join the means of all layers to ``[N, layers * D]``, of the sources and of the targets."""
    means = [pair for (_, pooling), pair in sorted(sides.items()) if pooling == "mean"]
    source, target = (np.concatenate([pair[side] for pair in means], axis=1) for side in (0, 1))
    return source, target


def behind_heads(
    about: dict[str, Any], embed: Embed, train: Sequence[Record], chosen: Asked, test: Asked
) -> dict[str, Any]:
    """The row of projection heads at the readout where heads of fewer epochs are best."""
    layout, same = LAYOUTS[0], asked(test.data, train).same
    known, held_out, new = (embed(records, layout) for records in (train, chosen.records, test.records))

    def best_at(place: tuple[int, str], epochs: int) -> tuple[float, ProjectionHeads]:
        return fit_heads(
            *known[place],
            same,
            lambda heads: reciprocal_rank(*sides_behind(heads, *held_out[place]), chosen),
            epochs=epochs,
        )

    place = max(known, key=lambda each: best_at(each, EPOCHS_TRIED)[0])
    _, heads = best_at(place, EPOCHS)
    words = f"{Readout(layout, *place, centred=False).words}, {heads.epochs} epochs"
    return row({**about, "method": "heads", "choice": words}, *sides_behind(heads, *new[place]), test)
