"""The curve over shares of the data: one table and one picture of several files of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from run_figures import Figures

from stepjepa.experiments.statistics import paired_t, spread
from stepjepa.files import atomic_write

# The file of figures, and how many records its runs are trained on.
SHARES = {"synth-1-16": 500, "synth-1-8": 1000, "synth-1-4": 2000, "synth-1-2": 4000, "synth-long": 8000}
BASELINE = "regular"
MARKS = (("o", "#D55E00"), ("s", "#0072B2"), ("^", "#009E73"), ("D", "#999999"))

Curves = dict[str, dict[int, dict[str, float]]]
"""Scores by arm, number of records, and seed."""


def curves(figures: Mapping[int, Sequence[Figures]]) -> Curves:
    """Scores of the arms that there are at several shares, the baseline first.

    Args:
        figures: runs by number of records.
    """
    found: Curves = {}
    for records, runs in sorted(figures.items()):
        for run in sorted(runs, key=lambda each: (each.label != BASELINE, each.label)):
            found.setdefault(run.label, {}).setdefault(records, {})[run.run.seed] = run.scores[
                str(run.run.protocol["headline"])
            ]
    kept = {label: points for label, points in found.items() if len(points) > 1}
    return dict(sorted(kept.items(), key=lambda item: item[0] != BASELINE))


def rows(found: Curves) -> list[list[str]]:
    """One row for each arm and, for all but the baseline, one of its differences; one cell for each share.

    Args:
        found: of :func:`curves`.
    """
    sizes = sorted({records for points in found.values() for records in points})
    lines = []
    for label, points in found.items():
        lines.append([label, *(score(points.get(records)) for records in sizes)])
        if label != BASELINE and BASELINE in found:
            pairs = [(points.get(records), found[BASELINE].get(records)) for records in sizes]
            lines.append([f"{label} − {BASELINE}, points [95 %]", *(difference(*pair) for pair in pairs)])
    return [["records", *(f"{records:,}" for records in sizes)], *lines]


def score(scores: dict[str, float] | None) -> str:
    """Mean and standard deviation of the scores of some seeds, as a cell of a table."""
    if not scores:
        return "–"
    found = spread(list(scores.values()))
    return f"{found.mean:.1%}" if found.std is None else f"{found.mean:.1%} ± {100 * found.std:.1f} ({found.n} seeds)"


def difference(ours: dict[str, float] | None, theirs: dict[str, float] | None) -> str:
    """The mean difference of the seeds that both have, in percentage points, and its interval, as a cell of a table."""
    seeds = sorted(set(ours or {}) & set(theirs or {}))
    if not ours or not theirs or not seeds:
        return "–"
    test = paired_t([100 * ours[seed] for seed in seeds], [100 * theirs[seed] for seed in seeds])
    interval = "" if test.low is None else f" [{test.low:+.1f}, {test.high:+.1f}]"
    return f"{test.mean:+.1f}{interval}"


def draw(found: Curves, path: Path) -> None:
    """Mean and standard deviation of every arm against the number of records.

    Args:
        found: of :func:`curves`.
        path: of the picture, a PNG.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for (label, points), (mark, colour) in zip(found.items(), MARKS, strict=False):
        spreads = [spread(list(scores.values())) for scores in points.values()]
        means, errors = [each.mean for each in spreads], [each.std or 0.0 for each in spreads]
        axis.errorbar(list(points), means, yerr=errors, marker=mark, color=colour, capsize=3, label=label)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(sorted(SHARES.values())))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xlabel("records trained on, each twelve times")
    axis.set_ylabel("right answers, mean and standard deviation")
    axis.legend()
    with atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="png", dpi=150)
