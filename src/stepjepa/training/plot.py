"""The picture of a finished run: losses, similarity and rank over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepjepa.files import atomic_write, read_jsonl
from stepjepa.run_folder import METRICS_FILE
from stepjepa.terminal import PALETTE

PLOT_FILE = "metrics.png"

PANELS: dict[str, dict[str, str]] = {
    "LM loss": {"lm_loss": "training", "eval_lm_loss": "held out"},
    "alignment loss": {"jepa_loss": "training", "eval_jepa_loss": "held out"},
    "cosine of pairs": {"matched_similarity": "matched", "shuffled_similarity": "shuffled"},
    "effective rank": {"source_rank": "source", "target_rank": "target"},
}
"""What each panel shows: columns of ``metrics.jsonl``, where the run has them, and their labels."""


def draw_metrics(folder: Path) -> None:
    """Draw ``metrics.jsonl`` of a run folder as ``metrics.png``."""
    from matplotlib.figure import Figure

    lines = [line for _, line in read_jsonl(folder / METRICS_FILE)]
    panels = {title: _curves(lines, columns) for title, columns in PANELS.items()}
    shown = {title: curves for title, curves in panels.items() if curves}
    if not shown:
        return
    figure = Figure(figsize=(3.6 * len(shown), 3), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        for colour, (label, points) in zip(PALETTE, curves.items(), strict=False):
            axes.plot(*zip(*points, strict=True), ".-", color=colour, label=label, markersize=4)
        axes.set(title=title, xlabel="step")
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.legend()
    with atomic_write(folder / PLOT_FILE, "wb") as stream:
        figure.savefig(stream, format="png", dpi=120)


def _curves(lines: list[dict[str, Any]], columns: dict[str, str]) -> dict[str, list[tuple[int, float]]]:
    """The points (step, value) of each column that has any, by label."""
    found = {
        label: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        for name, label in columns.items()
    }
    return {label: points for label, points in found.items() if points}
