"""Charts of a page, drawn by Plotly in the reader's browser; here they are data.

A chart is an empty element with its traces beside it as JSON. ``templates/charts.js`` draws it when it comes into view,
in the colours that the page has then, and again when they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from stepjepa.pages.markup import json_block

PALETTE = ("#3a7fd5", "#d9662b", "#2a9d6f", "#b45fc6", "#b8901c", "#d64d6a", "#3d9db3", "#8a8577")
"""Colours of series, each told from the others and from both backgrounds."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Lines of series, for what colour alone would tell apart."""


def chart_text(text: object) -> str:
    """A text as Plotly shows it: it takes ``<b>``, ``<a href>`` and entities for markup in every label and hover.

    Args:
        text: any; ends up as it is.
    """
    return escape(str(text), quote=False)


def colour(number: int) -> str:
    """The colour of a series."""
    return PALETTE[number % len(PALETTE)]


def dash(number: int) -> str:
    """The look of a line."""
    return DASHES[number % len(DASHES)]


def chart(name: str, traces: Sequence[dict[str, Any]], layout: dict[str, Any], *, label: str, height: int = 320) -> str:
    """A chart as safe markup.

    Args:
        name: the ``id``, the only one of its kind on the page; letters, digits and hyphens.
        traces: Plotly's; texts in them are passed through :func:`chart_text`.
        layout: Plotly's, without colours of background, text and grid, which the page's theme decides.
        label: what the chart shows, for readers that don't see it.
        height: in CSS pixels.
    """
    data = json_block(f"{name}-data", {"data": list(traces), "layout": layout})
    return (
        f'<div class="chart" id="{escape(name)}" role="img" aria-label="{escape(label)}" '
        f'style="height:{int(height)}px"></div>{data}'
    )
