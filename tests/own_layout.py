"""A layout of a user's own, named on the command line by ``own_layout:main_only``."""

from __future__ import annotations

from typing import Any

from stepjepa import layout
from stepjepa.batch.sequences import Readout, Sequence, main_sequence


@layout("main_only", modes=("llm-jepa",))
def main_only(record: Any, predictors: Any, reading: Any) -> list[Sequence]:
    """Both views are read in the main text."""
    end = len(record.ids) - 1
    ends = {"source": end // 2, "target": end}
    return [
        main_sequence(record),
        *(Sequence(record.ids[:at], readouts=(Readout(0, kind, at - 1, at),)) for kind, at in ends.items()),  # type: ignore[arg-type]
    ]


def not_registered(record: Any, predictors: Any, reading: Any) -> list[Sequence]:
    """Has no decorator."""
    return []
