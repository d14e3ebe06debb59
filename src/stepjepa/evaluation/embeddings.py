"""Metrics of the embeddings of views: cosines, ranks, linear maps; for ``similarity`` and ``analyze``."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.monitors import COLLAPSE_SIMILARITY, MetricWindow
from stepjepa.objectives.reading import reading_config
from stepjepa.objectives.view_embeddings import ViewEmbeddings
from stepjepa.store.folder import RUN_FILE
from stepjepa.store.record import trained_objective

QUANTILES = (0.1, 0.2, 0.5, 0.8, 0.9)
TOP = 100  # number of largest singular values in the average, as in the LLM-JEPA paper (arXiv 2509.14252)


def similarity_config(run_folder: str | os.PathLike[str], views: str) -> JepaConfig:
    """Return the settings for reading ``views``, see :func:`reading_config`, of the model of a run folder.

    Raises:
        UserError: the folder holds no record of a run.
    """
    trained = trained_objective(run_folder)
    if trained is None:
        raise UserError(f"is no run folder (no {RUN_FILE} that says how the model was trained)", path=Path(run_folder))
    return reading_config(trained, views)


def pair_cosines(embeddings: ViewEmbeddings) -> NDArray[np.float64]:
    """Return the cosine of each matched pair, ``[P]``."""
    source, target = (torch.from_numpy(side).double() for side in (embeddings.source, embeddings.target))
    return np.asarray(F.cosine_similarity(source, target))


def record_cosines(embeddings: ViewEmbeddings, records: int) -> list[float | None]:
    """Return the mean cosine over the pairs of each of ``records`` records; None for one without a pair."""
    cosines = pair_cosines(embeddings)
    of_records: list[float | None] = [None] * records
    for index in sorted({*embeddings.record.tolist()}):
        of_records[index] = float(cosines[embeddings.record == index].mean())
    return of_records


def similarity_totals(embeddings: ViewEmbeddings) -> dict[str, float]:
    """Return ``pairs``, ``matched_similarity``, ``shuffled_similarity`` and those of ``MetricWindow.geometry``.

    ``shuffled_similarity`` is over all ``P * (P - 1)`` wrong partners; it is missing for a single pair.
    """
    window = MetricWindow(keep=len(embeddings.record))
    window.add_pairs(torch.from_numpy(embeddings.source), torch.from_numpy(embeddings.target))
    return {"pairs": float(len(embeddings.record)), **window.monitors()}


def similarity_quantiles(values: Iterable[float | None]) -> JsonObject:
    """Return ``n``, ``mean``, ``std`` and ``quantiles`` (by share) of cosines; None, not measured, is left out."""
    measured = np.asarray([value for value in values if value is not None], np.float64)
    if not len(measured):
        return {"n": 0}
    quantiles = {str(q): float(v) for q, v in zip(QUANTILES, np.quantile(measured, QUANTILES), strict=True)}
    return {"n": len(measured), "mean": float(measured.mean()), "std": float(measured.std()), "quantiles": quantiles}


def embedding_metrics(embeddings: ViewEmbeddings) -> JsonObject:
    """Return all metrics of one model; ``notes`` are sentences about their limits."""
    totals, source, target = similarity_totals(embeddings), embeddings.source, embeddings.target
    pairs, dimensions = source.shape
    matched = similarity_quantiles(pair_cosines(embeddings)) | {"mean": totals.pop("matched_similarity")}
    shuffled: JsonObject = {"n": pairs * (pairs - 1)}
    notes = []
    if pairs > 1:
        shuffled["mean"] = totals.pop("shuffled_similarity")
        if shuffled["mean"] > COLLAPSE_SIMILARITY:
            notes.append("unrelated pairs are as alike as related ones: the embeddings are one direction")
    if pairs < (enough := 4 * dimensions):
        notes.append(
            f"{pairs} pairs in {dimensions} dimensions are too few to tell a linear map; take {enough} or more"
        )
    return {
        **totals,
        "pairs": pairs,
        "records": len(np.unique(embeddings.record)),
        "dimensions": dimensions,
        "matched": matched,
        "shuffled": shuffled,
        "difference": singular_values(source - target),
        "linear_map": linear_map_errors(embeddings),
        "notes": notes,
    }


def singular_values(matrix: NDArray[np.float32]) -> JsonObject:
    """Return ``values``, the singular values of a matrix ``[P, D]``, not centred; ``top_mean``, the mean of ``top``."""
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    top = min(TOP, len(values))
    return {"values": values.tolist(), "top": top, "top_mean": float(values[:top].mean())}


def linear_map_errors(embeddings: ViewEmbeddings) -> JsonObject:
    """Measure how well a linear map W of the sources X fits the targets Y.

    Returns:
        ``error``: the smallest ``||X W - Y||`` (Frobenius), as in the LLM-JEPA paper; always zero if there are no more
        pairs than dimensions. ``held_out``: the squared error of a ridge regression with an intercept that predicts
        each half of the records from the other, over ``||Y - mean of Y||^2``; 1 is as good as the mean, and there is
        no upper limit. None if it is undefined.
    """
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GroupKFold, cross_val_predict

    source, target = embeddings.source.astype(np.float64), embeddings.target.astype(np.float64)
    # Directions below the rounding of the float32 embeddings are noise, which an exact solution would amplify.
    rounding = float(np.finfo(np.float32).eps)
    weights = np.linalg.lstsq(source, target, rcond=rounding * max(source.shape))[0]
    spread, held_out = float(((target - target.mean(0)) ** 2).sum()), None
    if spread > 0 and len(np.unique(embeddings.record)) > 1:
        ridge = Ridge(alpha=rounding * float((source**2).sum()))
        # Pairs of one record are never on both sides.
        predicted = cross_val_predict(ridge, source, target, groups=embeddings.record, cv=GroupKFold(2))
        held_out = float(((predicted - target) ** 2).sum()) / spread
    return {"error": float(np.linalg.norm(source @ weights - target)), "held_out": held_out}
