"""What the measured rounds say: medians with ranges, ratios within a round, a Markdown table, a free file name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench_arms import REGULAR, Arm

Round = dict[str, dict[str, Any]]
"""Results of one round by arm."""


class Spread(NamedTuple):
    """Median and range of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values))


def best_trl(results: Round, arms: Sequence[Arm]) -> float:
    """Examples per second of TRL's fastest setting in a round."""
    return fastest(results, [arm.name for arm in arms if arm.is_trl])


def fastest(results: Round, names: Sequence[str]) -> float:
    """Examples per second of the fastest of some arms in a round."""
    return max(float(results[name]["examples_per_second"]) for name in names)


def effective_ratio(run: dict[str, Any], arm: Arm) -> float:
    """Tokens over those of plain fine-tuning, averaged over steps with and without views."""
    return 1 + arm.view_share * (float(run["token_ratio"]) - 1)


def summarise(rounds: Sequence[Round], arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """Figures of every arm. A ratio is taken within a round, where the machine was in one mood; then comes the median.

    Args:
        rounds: results by arm, each with ``examples_per_second``, ``peak_mib``, ``baseline_mib``, ``tokens`` and
            ``examples``, and ``token_ratio`` where views are run.
        arms: all of them, among them ``regular`` and at least one of TRL.

    Returns:
        By arm: ``examples_per_second``, ``over_regular`` and ``over_trl`` (speed over that of ``regular`` and of TRL's
        fastest setting in the same round), ``peak_mib``, ``baseline_mib``, ``tokens_per_example``; for an arm with
        views also ``token_ratio`` and ``time_over_tokens``: its time over that of ``regular`` (with LoRA: of
        ``regular`` with LoRA), divided by the ratio of tokens. There 1 means that a view costs just its tokens.
    """
    result: dict[str, dict[str, Any]] = {}
    for arm in arms:
        runs = [results[arm.name] for results in rounds]
        speeds = [run["examples_per_second"] for run in runs]
        regular = [results[REGULAR]["examples_per_second"] for results in rounds]
        best = [best_trl(results, arms) for results in rounds]
        figures: dict[str, Any] = {
            "examples_per_second": Spread.of(speeds),
            "over_regular": Spread.of([a / b for a, b in zip(speeds, regular, strict=True)]),
            "over_trl": Spread.of([a / b for a, b in zip(speeds, best, strict=True)]),
            "peak_mib": Spread.of([run["peak_mib"] for run in runs]),
            "baseline_mib": Spread.of([run["baseline_mib"] for run in runs]),
            "tokens_per_example": sum(run["tokens"] for run in runs) / sum(run["examples"] for run in runs),
        }
        if arm.has_views:
            ratio = effective_ratio(runs[0], arm)
            alike = [results[arm.reference]["examples_per_second"] for results in rounds]
            figures["token_ratio"] = ratio
            figures["time_over_tokens"] = Spread.of([b / a / ratio for a, b in zip(speeds, alike, strict=True)])
        result[arm.name] = figures
    return result


def as_json(summary: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Spreads by name instead of by place."""
    return {
        arm: {name: value._asdict() if isinstance(value, Spread) else value for name, value in figures.items()}
        for arm, figures in summary.items()
    }


COLUMNS = (
    "arm",
    "examples/s",
    "over regular",
    "over TRL's best",
    "tokens/example",
    "token ratio",
    "time over regular / token ratio",
    "peak MiB",
    "MiB before training",
)


def markdown(summary: dict[str, dict[str, Any]]) -> str:
    """One suite as a table: median, with the range over the rounds in brackets.

    Args:
        summary: of :func:`as_json`.
    """
    lines = [row(COLUMNS), row(["---"] * len(COLUMNS))]
    for name, figures in summary.items():
        views = "token_ratio" in figures
        cells = [
            name,
            spread(figures["examples_per_second"], 1),
            spread(figures["over_regular"], 2),
            spread(figures["over_trl"], 2),
            f"{figures['tokens_per_example']:.0f}",
            f"{figures['token_ratio']:.2f}" if views else "–",
            spread(figures["time_over_tokens"], 2) if views else "–",
            f"{figures['peak_mib']['median']:.0f}",
            f"{figures['baseline_mib']['median']:.0f}",
        ]
        lines.append(row(cells))
    return "\n".join(lines)


def row(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def spread(value: dict[str, float], digits: int) -> str:
    """Median and range in a cell."""
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def free_name(wanted: Path) -> Path:
    """The path itself, or with ``-2``, ``-3`` ... before its suffix if something is there: no result is overwritten."""
    path, number = wanted, 1
    while path.exists():
        number += 1
        path = wanted.with_stem(f"{wanted.stem}-{number}")
    return path
