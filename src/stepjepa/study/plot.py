"""Plot a comparison: means with error bars, one point per seed, a line for the baseline."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError
from stepjepa.base.terminal import PALETTE
from stepjepa.evaluation.summary_text import score_words
from stepjepa.study.arms import Arm, ComparedArms
from stepjepa.study.evaluated_run import HITS_AT_1

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg")

CAPTION = (
    "Mean ± standard deviation over seeds; dots are seeds, the dashed line is the baseline's mean; "
    "in brackets: equal to the baseline's"
)
"""The sentence below a picture."""

NARROWEST = 5.0
"""Smallest width of an axis, in percentage points: scores that are all equal have no spread."""


def check_picture(path: str | os.PathLike[str], setting: str = "plot") -> None:
    """Raise UserError if the file name that a setting holds ends in none of ``PICTURES``."""
    if Path(path).suffix.lower() not in PICTURES:
        raise UserError(f"`{setting}` draws {' or '.join(PICTURES)}; end its name in one of them", path=path)


def _limits(low: float, high: float) -> tuple[float, float]:
    """Return the limits of an axis of percentages: at least :data:`NARROWEST` apart, between 0 and 100."""
    if high - low < NARROWEST:
        middle = (low + high) / 2
        low = min(max(middle - NARROWEST / 2, 0.0), 100.0 - NARROWEST)
        high = low + NARROWEST
    return max(low, 0.0), min(high, 100.0)


def picture(comparison: ComparedArms, kind: str, *, captioned: bool = True) -> bytes:
    """Return the content of a picture's file; the same data gives the same bytes.

    Args:
        comparison: the arms to draw.
        kind: ``png`` or ``svg``.
        captioned: write :data:`CAPTION` over the panels; a page has it beside the picture, where it can be wrapped.
    """
    from matplotlib import rc_context

    content = io.BytesIO()
    # Names come from the user: a dollar sign starts no formula.
    with rc_context({"svg.hashsalt": "stepjepa", "text.parse_math": False}):
        draw(comparison, captioned=captioned).savefig(
            content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {}
        )
    return content.getvalue()


def _draw_measure(axes: Axes, arms: Sequence[Arm], measure: str) -> None:
    """Draw a measure of each arm in a row of its own: the seeds as points, mean and standard deviation."""
    for row, arm in enumerate(arms):
        spread = arm.spread(measure)
        if spread is None:
            continue
        colour = PALETTE[row % len(PALETTE)]  # as the curves of the page
        # Spread the seeds vertically, so that equal scores do not overlap.
        rows = [row + 0.24 * ((place + 0.5) / spread.n - 0.5) for place in range(spread.n)]
        axes.plot([100 * (run.mean(measure) or 0) for run in arm.runs], rows, "o", color="#777777", markersize=3)
        bar = None if spread.std is None else 100 * spread.std
        axes.errorbar(100 * spread.mean, row, xerr=bar, fmt="D", color=colour, markersize=5, capsize=3, zorder=3)
        if row == 0:
            axes.axvline(100 * spread.mean, color=colour, linestyle="--", linewidth=1)
    low, high = _limits(*axes.get_xlim())
    axes.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))  # room for markers at the ends
    axes.set_xlabel(f"share of {'questions' if measure == HITS_AT_1 else 'answers'}, %", fontsize=9)
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)


def draw(comparison: ComparedArms, *, captioned: bool = True) -> Figure:
    """Draw one axes per measure with one row per arm, the baseline on top; ``captioned`` as in :func:`picture`."""
    from matplotlib.figure import Figure

    measures, labels = comparison.measure_names(), [comparison.baseline.name]
    if any(arm.spread(HITS_AT_1) is not None for arm in comparison.arms):
        measures[HITS_AT_1] = "nearest answer right"
    for name, difference in comparison.differences.items():
        budget = "neither steps nor FLOPs" if difference.budget == "neither" else difference.budget
        labels.append(f"{name} [{budget or 'no seed in common'}]")
    # A longer label would leave no room for the axes.
    labels = [label[:100] for label in labels]
    size = (3.2 * len(measures) + min(0.075 * max(map(len, labels)), 6) + 0.6, 0.42 * len(labels) + 1.7)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for axes, (measure, name) in zip(panels, measures.items(), strict=True):
        _draw_measure(axes, comparison.arms, measure)
        axes.set_title(score_words(name), fontsize=10)
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    if captioned:
        figure.suptitle(CAPTION, fontsize=9, wrap=True)
    return figure
