"""What ``scaling.py`` measured as tables."""

from __future__ import annotations

from typing import Any

from bench_table import row

KIB = 2**10


def markdown(results: dict[str, Any]) -> str:
    """Time of a record at every size, a ratio; for processes also efficiency, and what they send each other."""
    parts = []
    curves = results["curves"]
    plain = {name: curve for name, curve in curves.items() if not curve["parallel"]}
    for name, curve in plain.items():
        unit = unit_of_time(curve)
        heads = [f"time a record, by {name}", *map(str, curve["sizes"])]
        lines = [row(heads), row(["---"] * len(heads))]
        for arm, points in curve["points"].items():
            times = ["–" if point is None else f"{point['seconds_per_record'] / unit:.3g}" for point in points]
            lines.append(row([arm, *times]))
        parts.append("\n".join(lines))
    for name, curve in curves.items():
        if curve["parallel"]:
            parts += [_processes(name, curve), _communication(name, curve)]
    return "\n\n".join(parts)


def unit_of_time(curve: dict[str, Any]) -> float:
    """Seconds a record of the first arm at its first size, which all times of a curve are told in."""
    first: float = next(point["seconds_per_record"] for point in next(iter(curve["points"].values())) if point)
    return first


def efficiency(sizes: list[int], points: list[dict[str, Any]]) -> list[float]:
    """Time of a record in the fewest processes over that in n, over how many times more n is; 1 is perfect."""
    first = points[0]["seconds_per_record"] * sizes[0]
    return [first / (point["seconds_per_record"] * size) for size, point in zip(sizes, points, strict=True)]


def _processes(name: str, curve: dict[str, Any]) -> str:
    sizes = curve["sizes"]
    unit = unit_of_time(curve)
    heads = [name, *(f"{size}: time a record" for size in sizes), *(f"{size}: efficiency" for size in sizes[1:])]
    lines = [row(heads), row(["---"] * len(heads))]
    for arm, points in _whole(curve).items():
        times = [f"{point['seconds_per_record'] / unit:.3g}" for point in points]
        lines.append(row([arm, *times, *(f"{share:.2f}" for share in efficiency(sizes, points)[1:])]))
    return "\n".join(lines)


def _whole(curve: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The arms of which no point failed."""
    return {arm: points for arm, points in curve["points"].items() if None not in points}


def _communication(name: str, curve: dict[str, Any]) -> str:
    """Of the most processes; a ring sends (n - 1) / n of these bytes, for an all-reduce twice."""
    most = max(curve["sizes"])
    found = {arm: points[curve["sizes"].index(most)] for arm, points in _whole(curve).items()}
    kinds = list(dict.fromkeys(kind for point in found.values() for kind in point.get("communication", {})))
    heads = [f"{name}: calls and KiB of a step in {most}", *kinds, "trained weights, KiB"]
    lines = [row(heads), row(["---"] * len(heads))]
    for arm, point in found.items():
        sent = point.get("communication", {})
        cells = [f"{sent[kind]['calls']}: {sent[kind]['bytes'] / KIB:.4g}" if kind in sent else "–" for kind in kinds]
        weights = f"{point['trained_bytes'] / KIB:.4g}" if "trained_bytes" in point else "–"
        lines.append(row([arm, *cells, weights]))
    return "\n".join(lines)
