"""What ``gpu.py`` measured as tables, and whether it is what is aimed at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench_table import row

REGULAR, PUBLISHED = "regular, sdpa causal", "published two rows, dense mask"
FLEX = "forest, flex block mask"
SETTING = ("model", "training", "checkpointing")
AIMED_LENGTH = 4096

Point = dict[str, Any]


class GpuTarget(NamedTuple):
    """One aim.

    Attributes:
        what: in words.
        aim: the bound.
        at_least: whether the bound is the least or the most that is aimed at.
        found: the figure.
    """

    what: str
    aim: float
    at_least: bool
    found: float

    @property
    def reached(self) -> bool:
        """Whether the figure is on the right side of the bound."""
        return self.found >= self.aim if self.at_least else self.found <= self.aim


def find_targets(points: list[Point]) -> list[GpuTarget]:
    """All aims for which there are figures of whole steps."""
    measured = [point for point in points if "none" not in point and not point["forward_only"]]
    found: list[GpuTarget] = []
    for setting, group in itertools.groupby(measured, key=lambda point: tuple(point[name] for name in SETTING)):
        where = f"{setting[0]}, {setting[1]}, checkpointing {setting[2]}"
        by_length: dict[int, dict[str, Point]] = {}
        for point in group:
            by_length.setdefault(point["length"], {})[point["arm"]] = point
        found += _published(where, by_length.get(AIMED_LENGTH, {}))
        found += _per_token(where, by_length)
        shares = {length: arms[REGULAR]["mfu"] for length, arms in by_length.items() if REGULAR in arms}
        if shares:
            best = max(shares, key=lambda length: shares[length])
            found.append(GpuTarget(f"{where}: MFU of regular, best at {best} tokens", 0.5, True, shares[best]))
    return found


def _published(where: str, arms: dict[str, Point]) -> Iterator[GpuTarget]:
    if PUBLISHED not in arms:
        return
    for name, point in arms.items():
        if name.startswith("llm-jepa") and name.endswith(FLEX):
            ratio = point["main_tokens_per_second"] / arms[PUBLISHED]["main_tokens_per_second"]
            yield GpuTarget(f"{where}: {name} over {PUBLISHED}, {AIMED_LENGTH} tokens", 3.0, True, ratio)


def _per_token(where: str, by_length: dict[int, dict[str, Point]]) -> Iterator[GpuTarget]:
    """Time of a token over regular's, at the length where it is longest."""
    worst: dict[str, tuple[float, int]] = {}
    for length, arms in by_length.items():
        for name, point in arms.items():
            if REGULAR in arms and name.endswith(FLEX):
                ratio = arms[REGULAR]["tokens_per_second"] / point["tokens_per_second"]
                worst[name] = max(worst.get(name, (0.0, 0)), (ratio, length))
    for name, (ratio, length) in worst.items():
        yield GpuTarget(f"{where}: {name}, time of a token over regular, worst at {length}", 1.05, False, ratio)


def markdown(results: dict[str, Any]) -> str:
    """Everything that was measured: the device, the checks, the targets, all points."""
    ceiling = results["ceiling"]
    parts = [f"{ceiling['device']}: {ceiling['flops_per_second'] / 1e12:.1f} TFLOP/s in a bfloat16 product"]
    if results.get("checks"):
        parts.append(_checks(results["checks"]))
    targets = find_targets(results["points"])
    if targets:
        lines = [row(["target", "aim", "found", "reached"]), row(["---"] * 4)]
        for target in targets:
            aim = f"{'≥' if target.at_least else '≤'} {target.aim:g}"
            lines.append(row([target.what, aim, f"{target.found:.2f}", "yes" if target.reached else "no"]))
        parts.append("\n".join(lines))
    parts.append(_points(results["points"]))
    if any(point.get("forward_only") for point in results["points"]):
        parts.append("\\* forward pass alone: FlexAttention has no backward pass on a CPU; no target is taken from it.")
    return "\n\n".join(parts)


def _checks(checks: list[dict[str, Any]]) -> str:
    heads = ["checked against separate rows", "error of embeddings", "error of gradients", "passed"]
    lines = [row(heads), row(["---"] * 4)]
    for one in checks:
        errors = ["–" if one[name] is None else f"{one[name]:.1e}" for name in ("embeddings", "gradient")]
        lines.append(row([one["what"], *errors, "yes" if one["passed"] else "NO"]))
    return "\n".join(lines)


def _points(points: list[Point]) -> str:
    heads = [*SETTING, "length", "arm", "main tokens/s", "tokens/s", "MFU", "peak MiB"]
    lines = [row(heads), row(["---"] * len(heads))]
    for point in points:
        cells = [str(point[head]) for head in (*SETTING, "length")]
        if "none" in point:
            lines.append(row([*cells, point["arm"], point["none"], "–", "–", "–"]))
            continue
        arm = point["arm"] + (" \\*" if point["forward_only"] else "")
        rates = [f"{point[name]:.0f}" for name in ("main_tokens_per_second", "tokens_per_second")]
        lines.append(row([*cells, arm, *rates, f"{100 * point['mfu']:.1f} %", f"{point['peak_mib']:.0f}"]))
    return "\n".join(lines)
