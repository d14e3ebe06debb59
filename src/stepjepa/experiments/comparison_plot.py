"""The picture of a comparison: means with error bars, every seed a point, the baseline a line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepjepa.errors import UserError
from stepjepa.experiments.comparison import Comparison
from stepjepa.experiments.comparison_table import measure_names
from stepjepa.files import atomic_write
from stepjepa.terminal import drawable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"
PICTURES = (".png", ".svg")
BASELINE_COLOUR, ARM_COLOUR, SEED_COLOUR = "#D55E00", "#0072B2", "#777777"

# Seeds with equal scores must not lie on each other.
_WIDTH = 0.24


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a picture of another kind before anything is computed.

    Raises:
        UserError: the name ends in none of ``PICTURES``.
    """
    if Path(path).suffix.lower() not in PICTURES:
        raise UserError(f"--plot draws {' or '.join(PICTURES)}; end its name in one of them", path=path)


def write_picture(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Draw a comparison into a file, whole or not at all; the same data gives the same bytes.

    Args:
        comparison: from ``comparison.compare``.
        path: ends in one of ``PICTURES``.
    """
    from matplotlib import rc_context

    kind = Path(path).suffix.lower()[1:]
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    with rc_context({"svg.hashsalt": "stepjepa"}):
        figure = draw(comparison)
        with atomic_write(path, "wb") as stream:
            figure.savefig(stream, format=kind, dpi=150, metadata=metadata)


def draw(comparison: Comparison) -> Figure:
    """One axes for each measure, one row for each arm, the baseline on top."""
    from matplotlib.figure import Figure

    names = measure_names(comparison)
    labels = [_label(comparison, arm.name) for arm in comparison.arms]
    longest = max(map(len, labels))
    size = (3.2 * len(names) + min(0.075 * longest, 6) + 0.6, 0.42 * len(comparison.arms) + 1.7)
    figure = Figure(figsize=size, layout="constrained")
    for axes, (measure, name) in zip(
        figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names.items(), strict=True
    ):
        _panel(axes, comparison, measure)
        axes.set_title(drawable(name, FONT), fontsize=10, parse_math=False)
        axes.set_xlabel("share of answers, %", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    first = figure.axes[0]
    first.set_yticks(range(len(comparison.arms)))
    for label, arm in zip(
        first.set_yticklabels([drawable(label, FONT) for label in labels]), comparison.arms, strict=True
    ):
        label.set_parse_math(False)
        label.set_fontweight("bold" if arm is comparison.baseline else "normal")
    first.set_ylim(len(comparison.arms) - 0.5, -0.5)
    figure.suptitle(
        "Mean ± standard deviation over seeds; dots are seeds, the dashed line is the baseline's mean; in brackets: "
        "equal to the baseline's",
        fontsize=9,
        wrap=True,
    )
    return figure


def _label(comparison: Comparison, name: str) -> str:
    """An arm's name, and what is equal between it and the baseline."""
    if name == comparison.baseline.name:
        return name
    return f"{name} [{', '.join(comparison.differences[name].equal) or 'neither steps nor FLOPs'}]"


def _panel(axes: Any, comparison: Comparison, measure: str) -> None:
    for place, arm in enumerate(comparison.arms):
        found = arm.spread(measure)
        if found is None:
            continue
        is_baseline = arm is comparison.baseline
        colour = BASELINE_COLOUR if is_baseline else ARM_COLOUR
        values = [100 * value for value in (run.mean(measure) for run in arm.runs) if value is not None]
        apart = [place + _WIDTH * ((number + 0.5) / len(values) - 0.5) for number in range(len(values))]
        axes.plot(values, apart, "o", color=SEED_COLOUR, markersize=3, alpha=0.7, zorder=2)
        axes.errorbar(
            100 * found.mean,
            place,
            xerr=None if found.std is None else 100 * found.std,
            fmt="D",
            color=colour,
            markersize=5,
            capsize=3,
            zorder=3,
        )
        if is_baseline:
            axes.axvline(100 * found.mean, color=colour, linestyle="--", linewidth=1, zorder=1)
