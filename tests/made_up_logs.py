"""What made-up runs have logged: for tests of what is drawn over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepjepa.files import write_jsonl

STEP_JEPA = {"mode": "step-jepa", "predictors": 2, "lbd": 0.5}
"""Fields of ``JepaConfig`` of a run with views."""


def log(folder: Path, count: int = 5, *, views: bool = False, **more: Any) -> None:
    """Write ``metrics.jsonl`` into a run folder: losses that fall as 12 / step, and what is named."""
    own = {"jepa_loss": 0.25, "matched_similarity": 0.75, "shuffled_similarity": 0.5, "source_rank": 3.0}
    lines = [
        {
            "step": 7 * number,
            "epoch": number,
            "loss": 13 / number,
            "lm_loss": 12 / number,
            **(own if views else {}),
            **more,
        }
        for number in range(1, count + 1)
    ]
    write_jsonl(folder / "metrics.jsonl", lines)
