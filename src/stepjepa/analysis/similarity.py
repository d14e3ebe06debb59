"""How alike are the views of a trained model? Matched against shuffled pairs, on held-out records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stepjepa.analysis.representations import ViewEmbeddings, embed_views
from stepjepa.config import JepaConfig, changes_text
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.objectives.monitors import Window, share
from stepjepa.run_folder import RUN_FILE, run_of, trained_objective

QUANTILES = (0.1, 0.2, 0.5, 0.8, 0.9)


class Similarity(NamedTuple):
    """What :func:`compare_views` finds."""

    totals: dict[str, float]  # see similarity_totals
    per_record: list[float | None]  # mean cosine of each record's pairs; None without a pair


def similarity_config(run_folder: str | os.PathLike[str], views: str) -> JepaConfig:
    """How the views (``llm-jepa`` or ``step-jepa``) of a trained model are read, see :func:`reading_config`.

    Raises:
        UserError: no run folder or checkpoint in one, or :func:`refuse_stripped`.
    """
    refuse_stripped(run_folder)
    trained = trained_objective(run_folder)
    if trained is None:
        raise UserError(f"is no run folder (no {RUN_FILE} that tells how the model was trained)", path=Path(run_folder))
    return reading_config(trained, views)


def refuse_stripped(run_folder: str | os.PathLike[str]) -> None:
    """Refuse a model that was exported without the predictor tokens at which its views are read.

    Raises:
        UserError: it is one.
    """
    if (run_of(run_folder) or {}).get("stripped_predictors"):
        raise UserError(
            "was exported without the predictor tokens at which its views are read (--strip_predictors); name the run "
            "it was exported from",
            path=Path(run_folder),
        )


def reading_config(trained: dict[str, Any] | None, views: str) -> JepaConfig:
    """How a model's views are read.

    A model trained on the views that are asked for is read where it was trained to be read; any other, ``regular``
    runs among them, at the end of the source view, with no predictor token, which it has never seen.

    Args:
        trained: from ``run_folder.trained_objective``.
        views: ``llm-jepa`` or ``step-jepa``.
    """
    chosen: dict[str, Any] = {"over_length": "skip", "mode": views, "predictors": 0}
    if trained is not None:
        chosen |= {name: trained[name] for name in ("step_separator", "max_length", "labels")}
        if trained.get("plain"):
            # Also where the user's text alone was trained on: the answer is a view of its own.
            chosen |= {"plain": True, "labels": "assistant"}
        if trained["mode"] == views:
            # Runs of earlier versions do not know the last three.
            kept = ["layout", "predictors", "pairs", "front_pred", "reverse_pred", "last_token"]
            kept += ["pair_distance", "pooling", "jepa_layer"]
            chosen |= {name: trained[name] for name in kept if name in trained}
            if changes_text(chosen["layout"]):
                # The same views, in a main sequence without predictor tokens and isolated steps.
                chosen["layout"] = "branched"
    return JepaConfig(**chosen)


def compare_views(
    model: Any, tokenizer: Any, records: Sequence[Record], config: JepaConfig, *, batch_size: int = 16
) -> Similarity:
    """Embed all pairs of some records as training does, and compare them.

    Args:
        model: in evaluation mode, not wrapped.
        tokenizer: with the predictor tokens that ``config`` asks for.
        records: held-out ones.
        config: from :func:`similarity_config`.
        batch_size: records per batch.

    Raises:
        UserError: see ``analysis.representations.embed_views``.
    """
    embeddings = embed_views(model, tokenizer, records, config, batch_size=batch_size)
    cosines = pair_cosines(embeddings)
    per_record: list[float | None] = [None] * len(records)
    for index in np.unique(embeddings.record).tolist():
        per_record[index] = float(cosines[embeddings.record == index].mean())
    return Similarity(similarity_totals(embeddings), per_record)


def pair_cosines(embeddings: ViewEmbeddings) -> NDArray[np.float64]:
    """``[P]``: the cosine of each matched pair."""
    return (unit_rows(embeddings.source) * unit_rows(embeddings.target)).sum(axis=1)


def unit_rows(matrix: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rows of length 1; a row of zeros stays as it is."""
    wide = matrix.astype(np.float64)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def similarity_totals(embeddings: ViewEmbeddings) -> dict[str, float]:
    """Means over all pairs.

    Returns:
        ``pairs``, ``matched_similarity``, ``shuffled_similarity`` (over all P * (P - 1) wrong partners; missing for a
        single pair) and what ``monitors.Window.geometry`` gives, of all pairs.
    """
    window = Window(keep=len(embeddings))
    window.add_pairs(torch.from_numpy(embeddings.source), torch.from_numpy(embeddings.target))
    matched, shuffled, pairs, crossings = window.totals(["matched", "shuffled", "pairs", "crossings"])
    return {
        "pairs": pairs,
        **share("matched_similarity", matched, pairs),
        **share("shuffled_similarity", shuffled, crossings),
        **window.geometry(),
    }


def similarity_quantiles(values: Iterable[float | None]) -> dict[str, Any]:
    """How cosines are spread; None stands for one that was not measured.

    Returns:
        ``n``, ``mean``, ``std`` (of these values, not an estimate for others) and ``quantiles`` (from the share, as
        text, to the value); ``n`` alone where there are none.
    """
    measured = np.asarray([value for value in values if value is not None], np.float64)
    if not len(measured):
        return {"n": 0}
    return {
        "n": len(measured),
        "mean": float(measured.mean()),
        "std": float(measured.std()),
        "quantiles": {str(q): float(v) for q, v in zip(QUANTILES, np.quantile(measured, QUANTILES), strict=True)},
    }
