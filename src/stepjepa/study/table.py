"""A table, and how its numbers and intervals are written."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepjepa.study.evaluated_run import FIGURES

UNKNOWN = "–"
"""Shown for an unknown or untested value."""

FIGURE_HEADS = dict(zip(("LM loss", "matched", "shuffled", "tokens", "seconds", "FLOPs"), FIGURES, strict=True))
"""Column head -> name of the figure of a run."""

FIGURE_FORMATS = dict(zip(FIGURE_HEADS, ("{:.3f}", "{:.3f}", "{:.3f}", "{:,.0f}", "{:,.0f}", "{:.3g}"), strict=True))
"""Column head -> format of ``str.format``."""


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows with one cell per column; the first cell names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def formatted(value: float | None, pattern: str) -> str:
    """Format a number by a format of ``str.format``; None as :data:`UNKNOWN`."""
    return UNKNOWN if value is None else pattern.format(value)


def interval(low: float | None, high: float | None, spec: str = ".1f") -> str:
    """Format an interval of shares in per cent, with a space before it: `` [9.1, 16.0]``.

    Args:
        low: share, or None without an interval.
        high: share.
        spec: format of each end in per cent.
    """
    return "" if low is None or high is None else f" [{100 * low:{spec}}, {100 * high:{spec}}]"
