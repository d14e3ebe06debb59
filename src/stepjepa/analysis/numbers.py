"""What the embeddings of two views come to in numbers: similarity, ranks, their difference, the map between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.analysis.representations import ViewEmbeddings
from stepjepa.analysis.similarity import QUANTILES, pair_cosines, similarity_quantiles, similarity_totals, unit_rows
from stepjepa.objectives.monitors import COLLAPSE_SIMILARITY

TOP = 100
"""How many of the largest singular values are averaged, as in the LLM-JEPA paper (arXiv 2509.14252)."""

CROSSED = 2000
"""Most pairs that are crossed with each other for the quantiles of shuffled pairs."""

Matrix = NDArray[np.float32] | NDArray[np.float64]


def analyse(embeddings: ViewEmbeddings, *, seed: int = 0) -> dict[str, Any]:
    """All numbers of one model.

    Args:
        embeddings: at least one pair.
        seed: of the halves of the linear map, and of the sample behind the quantiles of many shuffled pairs.

    Returns:
        ``pairs``, ``records``, ``dimensions``; cosines of ``matched`` and ``shuffled`` pairs, both means over all;
        effective ranks and ``retrieval_top1`` (missing for a single pair); the singular values of the ``difference`` of
        source and target, and of the ``unit_difference`` of the same scaled to length 1; ``linear_map``; ``notes``,
        sentences about what these numbers can't say.
    """
    totals, source, target = similarity_totals(embeddings), embeddings.source, embeddings.target
    spread = {"matched": pair_cosines(embeddings), "shuffled": _crossed_cosines(embeddings, seed)}
    cosines = {kind: similarity_quantiles(values) for kind, values in spread.items()}
    for kind, found in cosines.items():
        if (mean := totals.pop(f"{kind}_similarity", None)) is not None:
            found["mean"] = mean
    numbers: dict[str, Any] = {
        **totals,
        "pairs": len(embeddings),
        "records": len(np.unique(embeddings.record)),
        "dimensions": source.shape[1],
        **cosines,
        "difference": singular_values(source - target),
        "unit_difference": singular_values(unit_rows(source) - unit_rows(target)),
        "linear_map": linear_map(embeddings, seed=seed),
    }
    return {**numbers, "notes": _notes(numbers)}


def _crossed_cosines(embeddings: ViewEmbeddings, seed: int) -> NDArray[np.float64]:
    """Cosines of sources with the targets of others: of all pairs, or of a sample of them."""
    chosen = np.arange(len(embeddings))
    if len(chosen) > CROSSED:
        chosen = np.random.default_rng(seed).choice(chosen, CROSSED, replace=False)
    cosines = unit_rows(embeddings.source[chosen]) @ unit_rows(embeddings.target[chosen]).T
    return cosines[~np.eye(len(chosen), dtype=np.bool_)]


def singular_values(matrix: Matrix) -> dict[str, Any]:
    """The singular values of a matrix ``[P, D]``, not centred.

    Returns:
        ``values``, all ``min(P, D)``, the largest first; ``top``, how many of them are averaged; ``top_mean``.
    """
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    top = min(TOP, len(values))
    return {"values": values.tolist(), "top": top, "top_mean": float(values[:top].mean())}


def linear_map(embeddings: ViewEmbeddings, *, seed: int = 0) -> dict[str, Any]:
    """How near the targets Y are to a linear map W of the sources X.

    Returns:
        ``error``: the smallest ``||X W - Y||`` (Frobenius), as in the LLM-JEPA paper; zero by itself where there are
        no more pairs than dimensions. ``relative``: the square of the same for maps with an intercept, over
        ``||Y - mean of Y||^2``: between 0 and 1. ``held_out``: that ratio on pairs that the map was not fitted on: the
        records are halved by ``seed``, and each half is tested with the map and the mean of the other; 1 is no better
        than the mean, and there is no upper end. ``fitted_pairs``: of the smaller half. A ratio is None where it
        can't be formed.
    """
    source, target = embeddings.source.astype(np.float64), embeddings.target.astype(np.float64)
    records = np.unique(embeddings.record)
    # Halves of records, so that pairs of one record are never on both sides.
    first = np.isin(embeddings.record, np.random.default_rng(seed).permutation(records)[: len(records) // 2])
    everything = np.ones_like(first)
    halves = [(first, ~first), (~first, first)] if len(records) > 1 else []
    return {
        "error": float(np.linalg.norm(source @ _fit(source, target) - target)),
        "relative": _unexplained(source, target, [(everything, everything)]),
        "held_out": _unexplained(source, target, halves),
        "fitted_pairs": min(int(first.sum()), int((~first).sum())),
    }


def _unexplained(
    source: Matrix, target: Matrix, splits: Sequence[tuple[NDArray[np.bool_], NDArray[np.bool_]]]
) -> float | None:
    """Share of the targets' spread that maps with an intercept miss; each split is what to fit on and what to test."""
    missed = spread = 0.0
    for fitted, tested in splits:
        middle, mean = source[fitted].mean(0), target[fitted].mean(0)
        weights = _fit(source[fitted] - middle, target[fitted] - mean)
        wanted = target[tested] - mean
        missed += float((((source[tested] - middle) @ weights - wanted) ** 2).sum())
        spread += float((wanted**2).sum())
    return missed / spread if spread > 0 else None


def _fit(source: Matrix, target: Matrix) -> Matrix:
    # Directions below the rounding of the float32 embeddings are noise, which an exact solution would blow up.
    cutoff = float(np.finfo(np.float32).eps) * max(source.shape)
    return np.asarray(np.linalg.lstsq(source, target, rcond=cutoff)[0], np.float64)


def _notes(numbers: Mapping[str, Any]) -> list[str]:
    pairs, dimensions, fitted = numbers["pairs"], numbers["dimensions"], numbers["linear_map"]["fitted_pairs"]
    notes = []
    if numbers["shuffled"].get("mean", 0.0) > COLLAPSE_SIMILARITY:
        notes.append("unrelated pairs are as alike as related ones: the embeddings are one direction")
    if pairs <= dimensions:
        notes.append(
            f"{pairs} pairs in {dimensions} dimensions: some linear map fits them without error, whatever they are; "
            "take more records"
        )
    if fitted < 2 * dimensions:
        notes.append(
            f"the held-out map was fitted on {fitted} pairs in {dimensions} dimensions, too few to find a linear map "
            f"that may be there; take {4 * dimensions} pairs or more"
        )
    return notes


def as_markdown(names: Sequence[str], models: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of some models, from :func:`analyse`, as a Markdown table with one column for each."""
    columns = [_cells(numbers) for numbers in models]
    rows = [["", *names], *([what, *(column[what] for column in columns)] for what in columns[0])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    head, *body = ["| " + " | ".join(row) + " |" for row in padded]
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])


def _cells(numbers: Mapping[str, Any]) -> dict[str, str]:
    """What each row is about, and its number."""
    mapping, groups = numbers["linear_map"], numbers.get("groups", {})
    cells = {"pairs": f"{numbers['pairs']:,}", "dimensions": f"{numbers['dimensions']:,}"}
    shares = " ".join(f"{q:.1f}"[1:] for q in QUANTILES)
    for kind in ("matched", "shuffled"):
        quantiles = numbers[kind].get("quantiles", {}).values()
        cells[f"cosine, {kind}"] = _number(numbers[kind].get("mean"))
        cells[f"{kind}, quantiles {shares}"] = " ".join(map(_number, quantiles)) or _number(None)
    for view in ("source", "target"):
        ranks = (numbers.get(f"{view}_rank"), numbers.get(f"{view}_rank_centred"))
        cells[f"effective rank, {view} / centred"] = " / ".join(_number(rank, 1) for rank in ranks)
    for kind in ("within", "between") if groups else ():
        cells[f"cosine {kind} groups ({groups['groups']:,} groups)"] = _number(groups[kind])
    top = f"mean of the {numbers['difference']['top']} largest"
    return {
        **cells,
        "retrieval, nearest target is the right one": _number(numbers.get("retrieval_top1")),
        "singular values of source - target": f"{_number(numbers['difference']['top_mean'])} ({top})",
        "  of the same, scaled to length 1": f"{_number(numbers['unit_difference']['top_mean'])} ({top})",
        "linear map W of source to target, norm of error": _number(mapping["error"]),
        "  share of the spread of Y that it misses": _number(mapping["relative"]),
        "  the same, held out": _number(mapping["held_out"]),
    }


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def within_and_between(embeddings: NDArray[np.float32], groups: Sequence[str]) -> dict[str, float | int | None]:
    """How alike embeddings [N, D] are in a group and across groups: mean cosine over all pairs of different rows.

    Linear in N: the cosines of all pairs of unit vectors add up to (|their sum|^2 - their number) / 2.

    Args:
        embeddings: [N, D]
        groups: of each row, N.

    Returns:
        ``within`` and ``between``, None where there is no such pair; ``within_pairs`` and ``between_pairs``, how many
        there are; ``groups``, how many different ones.
    """
    rows = unit_rows(embeddings)
    _, members, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros((len(sizes), rows.shape[1]))  # [groups, D]
    np.add.at(sums, members, rows)
    within_pairs = int((sizes * (sizes - 1)).sum()) // 2
    between_pairs = len(rows) * (len(rows) - 1) // 2 - within_pairs
    squared, own = float((sums**2).sum()), float((rows**2).sum())
    within, between = (squared - own) / 2, (float((sums.sum(axis=0) ** 2).sum()) - squared) / 2
    return {
        "within": within / within_pairs if within_pairs else None,
        "between": between / between_pairs if between_pairs else None,
        "within_pairs": within_pairs,
        "between_pairs": between_pairs,
        "groups": len(sizes),
    }
