"""The picture of a run's metrics in its folder, ``metrics.png``."""

from itertools import chain
from pathlib import Path

from stepjepa.base.files import atomic_write, read_jsonl
from stepjepa.base.terminal import PALETTE
from stepjepa.store.folder import METRICS_FILE

PLOT_FILE = "metrics.png"

PANELS: dict[str, dict[str, str]] = {
    "LM loss": {"lm_loss": "training", "eval_lm_loss": "held out"},
    "alignment loss": {"jepa_loss": "training", "eval_jepa_loss": "held out"},
    "cosine of pairs": {"matched_similarity": "matched", "shuffled_similarity": "shuffled"},
    "effective rank": {"source_rank": "source", "target_rank": "target"},
}
"""Panels of the plot: title -> columns of ``metrics.jsonl`` with their labels."""


def draw_metrics(folder: Path) -> None:
    """Draw ``metrics.jsonl`` of a run folder as ``metrics.png``; panels without any value are skipped."""
    from matplotlib.figure import Figure

    lines = [line for _, line in read_jsonl(folder / METRICS_FILE)]
    curves = {
        name: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        for name in chain(*PANELS.values())
    }
    panels = [title for title, columns in PANELS.items() if any(map(curves.get, columns))]
    if not panels:
        return
    width, height = 3.6 * len(panels), 3.0
    figure = Figure(figsize=(width, height))
    # Margins in inches: a layout that measures all labels takes half of the time.
    figure.subplots_adjust(0.6 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.3 / height, wspace=0.27)
    for axes, title in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for colour, (name, label) in zip(PALETTE, PANELS[title].items(), strict=False):
            if curves[name]:
                axes.plot(*zip(*curves[name], strict=True), ".-", color=colour, label=label, markersize=4)
        axes.set(title=title, xlabel="step")
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.legend(loc="upper right")  # "best" may take seconds
    with atomic_write(folder / PLOT_FILE, "wb") as stream:
        figure.savefig(stream, format="png", dpi=120)
