"""The picture of a finished run shows the columns that the run has."""

from __future__ import annotations

from pathlib import Path

from stepjepa.files import write_jsonl
from stepjepa.training import plot


def test_the_curves_of_a_run(tmp_path: Path) -> None:
    lines = [
        {"step": 5, "lm_loss": 4.0, "jepa_loss": None},
        {"step": 5, "eval_lm_loss": 3.0},
        {"step": 10, "lm_loss": 2.0, "jepa_loss": 0.5},
    ]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    assert plot._curves(lines, plot.PANELS["LM loss"]) == {"training": [(5, 4.0), (10, 2.0)], "held out": [(5, 3.0)]}
    assert plot._curves(lines, plot.PANELS["alignment loss"]) == {"training": [(10, 0.5)]}
    assert plot._curves(lines, plot.PANELS["effective rank"]) == {}
    plot.draw_metrics(tmp_path)
    assert (tmp_path / plot.PLOT_FILE).read_bytes().startswith(b"\x89PNG")
