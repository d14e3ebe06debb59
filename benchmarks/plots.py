"""The pictures of docs/performance.md: cost of an example against answers to a question, and against a shared prefix.

python benchmarks/plots.py             # draw them from the newest results of the suites answers and prefix
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import fastest, points

from stepjepa.base.terminal import PALETTE

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "plots"

SUITES = {"answers": "answers to a question", "prefix": "tokens of a shared prefix"}
# The records of an epoch are as many at every point of this suite, so that their questions are others.
OVER_TRL = "answers"
ARMS = {"trl": "TRL, plain, its fastest setting", "regular": "plain", "branched": "branched", "separate": "separate"}


def costs(point: dict[str, Any], arm: str) -> tuple[float, float]:
    """Milliseconds and tokens of an example; ``trl`` is TRL's fastest setting at this point."""
    figures = point["summary"][fastest(point) if arm == "trl" else arm]
    return 1000 / figures["speed"]["median"], figures["tokens"]


def draw(suite: str) -> Path:
    """Draw the time and the tokens of an example at every point of a suite, both from 0.

    Those of :data:`OVER_TRL` are over the figures of TRL's fastest setting at the same point.
    """
    measured = points(suite)
    if not measured:
        sys.exit(f"error: there are no results of the suite {suite}; run bench.py --suite {suite}")
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes: tuple[Axes, Axes] = tuple(figure.subplots(1, 2))
    over_trl = suite == OVER_TRL
    units = ("time, over TRL's", "tokens, over TRL's") if over_trl else ("milliseconds an example", "tokens an example")
    for place, (panel, unit) in enumerate(zip(axes, units, strict=True)):
        for colour, (arm, label) in zip(PALETTE[1::-1] + PALETTE[2:], ARMS.items(), strict=False):
            values = [
                costs(point, arm)[place] / (costs(point, "trl")[place] if over_trl else 1)
                for point in measured.values()
            ]
            panel.plot(list(measured), values, "o-", color=colour, label=label, markersize=4)
        panel.set(xlabel=SUITES[suite], ylabel=unit, ylim=(0, None))
        if suite == "answers":
            panel.set_xscale("log", base=2)
            panel.set_xticks(list(measured), [str(each) for each in measured])
        panel.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes[0].legend(fontsize=8)
    path = FOLDER / f"performance-{suite}.png"
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or SUITES:
        print(draw(name))
