"""Figures as text: means with their deviations, differences with their intervals, tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from stepjepa.study.statistics import PairedT, spread

NOTHING = "–"


def mean(values: pd.Series) -> str:
    """Write the mean, and the standard deviation over seeds where there are several."""
    if values.isna().any() or values.empty:
        return NOTHING
    statistics = spread(list(values))
    return f"{statistics.mean:.1f}" + ("" if statistics.std is None else f" ± {statistics.std:.1f}")


def interval(difference: PairedT | None) -> str:
    """Write the mean difference and its interval; a single pair has none."""
    if difference is None:
        return NOTHING
    ends = "" if difference.low is None else f" [{difference.low:+.1f}, {difference.high:+.1f}]"
    return f"{difference.mean:+.1f}{ends}"


def listed(words: Sequence[str]) -> str:
    """Write a list in a sentence: ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Write a table.

    Args:
        heads: of the columns.
        rows: their cells.
        texts: number of columns, the first ones, that hold text; figures stand on the right.
    """
    rule = "|" + "---|" * texts + "---:|" * (len(heads) - texts)
    return "\n".join([_line(heads), rule, *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
