"""What ``profile_memory.py`` found as a table."""

from __future__ import annotations

from typing import Any

from bench_arms import trl_padded
from bench_table import row


def markdown(results: dict[str, Any]) -> str:
    """Memory of every arm in hundredths of the peak of TRL's process, or of the first arm's where TRL is not there."""
    suites = results["memory"]
    kinds = list(next(iter(next(iter(suites.values())).values()))["kinds"])
    heads = [
        "suite",
        "arm",
        "peak",
        "before training",
        "weights",
        "optimizer",
        "a step",
        *(f"... {kind}" for kind in kinds),
    ]
    lines = [row(heads), row(["---"] * len(heads))]
    for suite, arms in suites.items():
        trl = trl_padded(results["settings"]["batch_size"])
        unit = arms.get(trl, next(iter(arms.values())))["peak"]
        for name, found in arms.items():
            values = [found[key] for key in ("peak", "before", "weights", "optimizer", "step")]
            values += [found["kinds"][kind] for kind in kinds]
            lines.append(row([suite, name, *(f"{100 * value / unit:.3g}" for value in values)]))
    return "\n".join(lines)
