"""Values of run.json and of summaries as text: whatever stands there, a cell of a table comes of it."""

from __future__ import annotations

import json
from typing import Any

from stepjepa import terminal
from stepjepa.pages.material import finite

NOTHING = "–"
"""Stands for what is not known."""


def plain(value: Any) -> str:
    """Any value on one line."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False, default=str)


def number(value: Any, form: str = "{:,.0f}") -> str:
    """A number in a form of ``str.format``; :data:`NOTHING` for anything else."""
    return form.format(value) if finite(value) else NOTHING


def percent(value: Any) -> str:
    """A share between 0 and 1."""
    return number(value, "{:.1%}")


def interval(score: Any) -> str:
    """A score of a summary with its 95 % interval, where it has one: ``12.5% [9.1, 16.0]``."""
    if not isinstance(score, dict) or not finite(score.get("mean")):
        return NOTHING
    if not (finite(score.get("low")) and finite(score.get("high"))):
        return percent(score["mean"])
    return f"{score['mean']:.1%} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"


def duration(seconds: Any) -> str:
    """Seconds as ``terminal.duration`` says them."""
    return terminal.duration(seconds) if finite(seconds) and seconds >= 0 else NOTHING


def magnitude(value: Any) -> str:
    """A large number with a word for its size: ``2.92 T``."""
    if not finite(value):
        return NOTHING
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}"
