"""Embeddings of the views of records, read off a model from the sequences that training runs, and what they say."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from tqdm import tqdm

from stepjepa.base.errors import UserError, naming_batch_size
from stepjepa.batch.collate import Collator
from stepjepa.batch.sequences import SampledRecord, TokenSequence
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config.jepa import JepaConfig, changes_text
from stepjepa.data.records import Record
from stepjepa.models.encode import encode
from stepjepa.objectives.monitors import COLLAPSE_SIMILARITY, MetricWindow
from stepjepa.objectives.setup import packing, set_up_attention
from stepjepa.store.folder import RUN_FILE
from stepjepa.store.record import trained_objective

QUANTILES = (0.1, 0.2, 0.5, 0.8, 0.9)
TOP = 100  # of the largest singular values are averaged, as in the LLM-JEPA paper (arXiv 2509.14252)


def reading_config(trained: dict[str, Any] | None, views: str) -> JepaConfig:
    """How the views (``llm-jepa`` or ``step-jepa``) of a model are read, from its ``record.trained_objective``.

    A model trained on these views is read where it was trained to be read; any other, ``regular`` runs among them, at
    the end of the source view, with no predictor token, which it has never seen.
    """
    chosen: dict[str, Any] = {"over_length": "skip", "mode": views, "predictors": 0}
    if trained is not None:
        kept = ["step_separator", "max_length", "labels"]
        if trained["mode"] == views:
            kept += ["layout", "predictors", "pairs", "front_pred", "reverse_pred", "last_token"]
            kept += ["pair_distance", "pooling", "jepa_layer"]
        # Runs of earlier versions do not know all.
        chosen |= {name: trained[name] for name in kept if name in trained}
        if trained.get("plain"):
            # Also where the user's text alone was trained on: the answer is a view of its own.
            chosen |= {"plain": True, "labels": "assistant"}
        if changes_text(chosen.get("layout", "branched")):
            # The same views, in a main sequence without predictor tokens and isolated steps.
            chosen["layout"] = "branched"
    return JepaConfig(**chosen)


def similarity_config(run_folder: str | os.PathLike[str], views: str) -> JepaConfig:
    """The :func:`reading_config` of a run folder; UserError if it is none."""
    trained = trained_objective(run_folder)
    if trained is None:
        raise UserError(f"is no run folder (no {RUN_FILE} that tells how the model was trained)", path=Path(run_folder))
    return reading_config(trained, views)


@dataclass(frozen=True)
class ViewEmbeddings:
    """The embeddings of all P pairs of some records, in the records' order."""

    source: NDArray[np.float32]  # [P, D]
    target: NDArray[np.float32]  # [P, D]
    record: NDArray[np.int64]  # [P], index of the record that a pair is of
    pair: NDArray[np.int64]  # [P], which of its record's pairs, from 1; for Step-JEPA the number of the source step


def embed_views(
    model: Any, tokenizer: Any, records: Sequence[Record], config: JepaConfig, *, batch_size: int = 16
) -> ViewEmbeddings:
    """Embed the views of all pairs of some records; those without a pair, or over length, have none.

    ``model`` is in evaluation mode, ``config`` in a layout other than ``inplace``. A predictor head is no part of Enc
    and is not applied. UserError if no record has a pair.
    """
    try:
        encoding, _ = set_up_attention(model, replace(config, encoding="auto"))
    except ValueError as error:
        raise UserError(str(error).replace("jepa_layer:", "--layer:")) from None
    made = RecordTokenizer(tokenizer, config)
    tokenized = enumerate(made.tokenize_each(records))
    found = {index: record for index, record in tokenized if record is not None and record.pairs}
    if not found:
        what = f"{config.mode} views (step_separator {config.step_separator!r}, max_length {config.max_length})"
        told = f"none of {len(records)} records has a pair of {what}"
        raise UserError(told, path=records[0].path if records else None)
    options = packing(model, config, model.device.type)
    collator = _Views.of(config, made.predictors.tolist(), encoding=encoding, **options)
    # Long ones first, so that memory problems show at once; like lengths together, so that there is little padding.
    order = sorted(found, key=lambda index: -len(found[index].ids))
    embeddings: dict[int, NDArray[np.float32]] = {}  # [pairs of the record, 2, D]
    with torch.inference_mode(), naming_batch_size(batch_size):
        for start in tqdm(range(0, len(order), batch_size), f"embed, {batch_size} at a time", disable=None):
            some = order[start : start + batch_size]
            batch = send_to_device(collator(SampledRecord(found[index]) for index in some), model.device)
            read = encode(model, batch, lambda it: {"both": torch.stack(it.pairs, 1)}, layer=config.jepa_layer)
            parts = read["both"].float().split([len(found[index].pairs) for index in some])
            embeddings.update(zip(some, (part.cpu().numpy() for part in parts), strict=True))
    joined = np.concatenate([embeddings[index] for index in found])  # [P, 2, D]
    if not np.isfinite(joined).all():
        raise UserError("some embeddings are not finite; the model's numbers overflow: try --dtype float32")
    places = [(index, number + 1) for index, record in found.items() for number in range(len(record.pairs))]
    return ViewEmbeddings(joined[:, 0], joined[:, 1], *np.asarray(places).T)


class _Views(Collator):
    """Collates only what is read of records."""

    def sequences(self, item: SampledRecord) -> list[TokenSequence]:
        return [sequence for sequence in super().sequences(item) if sequence.readouts]


def compare_views(
    model: Any, tokenizer: Any, records: Sequence[Record], config: JepaConfig, **options: Any
) -> tuple[dict[str, float], list[float | None]]:
    """Embed all pairs of some records as training does; their :func:`similarity_totals`, and the mean cosine of each
    record's pairs, which is None without a pair. For the arguments see :func:`embed_views`."""
    embeddings = embed_views(model, tokenizer, records, config, **options)
    cosines = pair_cosines(embeddings)
    per_record: list[float | None] = [None] * len(records)
    for index in np.unique(embeddings.record).tolist():
        per_record[index] = float(cosines[embeddings.record == index].mean())
    return similarity_totals(embeddings), per_record


def pair_cosines(embeddings: ViewEmbeddings) -> NDArray[np.float64]:
    """``[P]``: the cosine of each matched pair."""
    source, target = (torch.from_numpy(each).double() for each in (embeddings.source, embeddings.target))
    return np.asarray(F.cosine_similarity(source, target))


def similarity_totals(embeddings: ViewEmbeddings) -> dict[str, float]:
    """``pairs``, ``matched_similarity``, ``shuffled_similarity`` (over all P * (P - 1) wrong partners; missing for a
    single pair) and what ``monitors.MetricWindow.geometry`` gives, of all pairs."""
    window = MetricWindow(keep=len(embeddings.record))
    window.add_pairs(torch.from_numpy(embeddings.source), torch.from_numpy(embeddings.target))
    return {"pairs": float(len(embeddings.record)), **window.monitors()}


def similarity_quantiles(values: Iterable[float | None]) -> dict[str, Any]:
    """``n``, ``mean``, ``std`` and ``quantiles`` (by share) of cosines, of which None was not measured."""
    measured = np.asarray([value for value in values if value is not None], np.float64)
    if not len(measured):
        return {"n": 0}
    quantiles = {str(q): float(v) for q, v in zip(QUANTILES, np.quantile(measured, QUANTILES), strict=True)}
    return {"n": len(measured), "mean": float(measured.mean()), "std": float(measured.std()), "quantiles": quantiles}


def analyse(embeddings: ViewEmbeddings) -> dict[str, Any]:
    """All numbers of one model; ``notes`` are sentences about what they can't say."""
    totals, source, target = similarity_totals(embeddings), embeddings.source, embeddings.target
    pairs, dimensions = source.shape
    matched = similarity_quantiles(pair_cosines(embeddings)) | {"mean": totals.pop("matched_similarity")}
    shuffled: dict[str, Any] = {"n": pairs * (pairs - 1)}
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
        "linear_map": linear_map(embeddings),
        "notes": notes,
    }


def singular_values(matrix: NDArray[np.float32]) -> dict[str, Any]:
    """``values``, all singular values of a matrix ``[P, D]``, not centred; ``top``, how many ``top_mean`` averages."""
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    top = min(TOP, len(values))
    return {"values": values.tolist(), "top": top, "top_mean": float(values[:top].mean())}


def linear_map(embeddings: ViewEmbeddings) -> dict[str, Any]:
    """How near the targets Y are to a linear map W of the sources X.

    Returns:
        ``error``: the smallest ``||X W - Y||`` (Frobenius), as in the LLM-JEPA paper; zero by itself where there are
        no more pairs than dimensions. ``held_out``: the square of the same for a ridge regression with an intercept,
        where each half of the records is predicted from the other, over ``||Y - mean of Y||^2``; 1 is no better than
        the mean, and there is no upper end. None where it can't be formed.
    """
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GroupKFold, cross_val_predict

    source, target = embeddings.source.astype(np.float64), embeddings.target.astype(np.float64)
    # Directions below the rounding of the float32 embeddings are noise, which an exact solution would blow up.
    rounding = float(np.finfo(np.float32).eps)
    weights = np.linalg.lstsq(source, target, rcond=rounding * max(source.shape))[0]
    spread, held_out = float(((target - target.mean(0)) ** 2).sum()), None
    if spread > 0 and len(np.unique(embeddings.record)) > 1:
        ridge = Ridge(alpha=rounding * float((source**2).sum()))
        # Pairs of one record are never on both sides.
        found = cross_val_predict(ridge, source, target, groups=embeddings.record, cv=GroupKFold(2))
        held_out = float(((found - target) ** 2).sum()) / spread
    return {"error": float(np.linalg.norm(source @ weights - target)), "held_out": held_out}
