"""The picture of a run's metrics in its folder, ``metrics.png``."""

from collections.abc import Collection, Mapping
from itertools import chain, cycle
from pathlib import Path

from stepjepa.base.files import atomic_write, read_jsonl
from stepjepa.base.terminal import PALETTE, note
from stepjepa.store.folder import METRICS_FILE, PLOT_FILE
from stepjepa.store.metric_names import HELD_OUT, UNNAMED, set_and_metric

PANELS: dict[str, dict[str, str]] = {
    "LM loss": {"lm_loss": "training", "eval_lm_loss": "held out"},
    "alignment loss": {"jepa_loss": "training", "eval_jepa_loss": "held out"},
    "cosine of pairs": {"matched_similarity": "matched", "shuffled_similarity": "shuffled"},
    "effective rank": {"source_rank": "source", "target_rank": "target"},
}
"""Panels of the plot: title -> columns of ``metrics.jsonl`` with their labels."""

# Shares of a panel's height: the frame of a legend and each of its entries, which must not hide a curve.
_LEGEND, _ENTRY = 0.06, 0.085


def draw_metrics(folder: Path) -> None:
    """Draw ``metrics.jsonl`` of a run folder as ``metrics.png``; panels without any value are skipped."""
    from matplotlib.figure import Figure

    # The model is not saved yet, which must not depend on a line that another program has damaged.
    metrics = read_jsonl(folder / METRICS_FILE, on_error=lambda error: note(f"{error}; it is not drawn"))
    lines = [line for _, line in metrics]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for title, columns in PANELS.items():
        labels = {**columns, **_of_sets(columns, dict.fromkeys(chain.from_iterable(lines)))}
        points = {
            label: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            for name, label in labels.items()
        }
        if any(points.values()):
            panels[title] = points
    if not panels:
        return
    width, height = 3.6 * len(panels), 3.0
    figure = Figure(figsize=(width, height))
    # Margins in inches: a layout that measures all labels takes half of the time.
    figure.subplots_adjust(0.6 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.3 / height, wspace=0.27)
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for colour, (label, curve) in zip(cycle(PALETTE), curves.items(), strict=False):
            if curve:
                axes.plot(*zip(*curve, strict=True), ".-", color=colour, label=label, markersize=4)
        axes.set(title=title, xlabel="step")
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.legend(loc="upper right")  # "best" may take seconds
        low, high = axes.get_ylim()
        share = min(_LEGEND + _ENTRY * len(curves), 0.5)
        axes.set_ylim(low, low + (high - low) / (1 - share))
    with atomic_write(folder / PLOT_FILE, "wb") as stream:
        figure.savefig(stream, format="png", dpi=120)


def _of_sets(columns: Mapping[str, str], logged: Collection[str]) -> dict[str, str]:
    """Return the logged columns of sets of held-out records with names, and their labels, for a panel.

    Args:
        columns: those of the panel with their labels.
        logged: all columns, in the order of their curves.
    """
    trained = [name for name in logged if not name.startswith(HELD_OUT)]
    labels = {}
    for name in (name for name in logged if name.startswith(HELD_OUT)):
        of_set, metric = set_and_metric(name, trained)
        if of_set != UNNAMED and f"{HELD_OUT}{metric}" in columns:
            # Between two dollar signs, matplotlib reads a formula.
            labels[name] = f"held out: {of_set}".replace("$", r"\$")
    return labels
