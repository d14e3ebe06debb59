"""Text, numbers, data and charts as safe markup: nothing that a user, a model or a file said becomes HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stepjepa import terminal
from stepjepa.pages.runs import is_number

UNKNOWN = "–"
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Line styles of Plotly, which tell apart what colour alone would."""

# Escapes the characters that could end a <script> element, or a line in one.
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class Section:
    """A part of the page under one heading.

    Attributes:
        anchor: the ``id`` of the section.
        title: the heading.
        html: safe markup.
        script: name of a script in ``templates``; the page runs no others.
    """

    anchor: str
    title: str
    html: Markup
    script: str | None = None


def render(template: str, **values: Any) -> Markup:
    """Fill in a template; every value is escaped unless it is ``Markup``."""
    return Markup(_environment().get_template(template).render(values))


def read_template(name: str) -> str:
    """The text of a file in ``templates``."""
    return (files("stepjepa.pages") / "templates" / name).read_text(encoding="utf-8")


def json_block(name: str, value: Any) -> Markup:
    """An element ``<script type="application/json" id=NAME>`` with data for a script; NaN and infinity become null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(terminal.finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup('<script type="application/json" id="{}">{}</script>').format(name, Markup(text.translate(_ESCAPED)))


def chart(name: str, label: str, traces: Sequence[Any], *, height: int = 320, **layout: Any) -> Markup:
    """A chart, which ``templates/charts.js`` draws with Plotly when it comes into view.

    Args:
        name: its ``id``.
        label: describes it to readers who don't see it.
        traces: of ``plotly.graph_objects``; texts in them have gone through :func:`chart_text`.
        height: in CSS pixels.
        layout: of Plotly, without colours, which the theme of the page decides.
    """
    from plotly import graph_objects as go

    layout.setdefault("margin", {"l": 48, "r": 12, "t": 8, "b": 40})
    layout["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, **layout.get("legend", {})}
    data = {
        "data": [trace.to_plotly_json() for trace in traces],
        "layout": go.Layout(hovermode="closest", **layout).to_plotly_json(),
    }
    element = '<div class="chart" id="{}" role="img" aria-label="{}" style="height:{}px"></div>{}'
    return Markup(element).format(name, label, height, json_block(f"{name}-data", data))


def names_axis(names: Sequence[str]) -> dict[str, Any]:
    """A vertical axis of names from top to bottom; long names lose their beginning, in which they are most alike."""
    shown = [name if len(name) <= 28 else f"…{name[-27:]}" for name in names]
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [chart_text(name) for name in shown],
        "range": [len(names) - 0.5, -0.5],
    }


def chart_text(text: object) -> str:
    """Escape a text for Plotly, which reads ``<b>``, ``<a href>`` and entities in every label as markup."""
    return escape(str(text), quote=False)


def plain(value: Any) -> str:
    """Any value on one line."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def number(value: Any, form: str = "{:,.0f}") -> str:
    """A number in a form of ``str.format``."""
    return form.format(value) if is_number(value) else UNKNOWN


def interval(score: Any) -> str:
    """A score of a summary with its 95 % interval, where it has one: ``12.5% [9.1, 16.0]``."""
    if not isinstance(score, dict) or not is_number(score.get("mean")):
        return UNKNOWN
    if not (is_number(score.get("low")) and is_number(score.get("high"))):
        return f"{score['mean']:.1%}"
    return f"{score['mean']:.1%} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"


def duration(seconds: Any) -> str:
    """Seconds in words."""
    return terminal.duration(seconds) if is_number(seconds) and seconds >= 0 else UNKNOWN


def magnitude(value: Any) -> str:
    """A large number with an SI prefix: ``2.92 T``."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if is_number(value) and abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return number(value)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("stepjepa.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {each.__name__: each for each in (plain, number, interval, duration, magnitude)}
    return environment
