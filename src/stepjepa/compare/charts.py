"""Templates, data and charts as safe markup: nothing that a user, a model or a file said becomes HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stepjepa import terminal
from stepjepa.compare.comparison import Comparison
from stepjepa.compare.logged_run import Run, is_number
from stepjepa.terminal import PALETTE

UNKNOWN = "–"
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Line styles of Plotly, which tell apart what colour alone would."""

POINTS = 1000
"""Most points of a line; longer ones are thinned."""

# Escapes the characters that could end a <script> element, or a line in one.
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}

# Columns of metrics.jsonl that share a chart where there is one run.
_TOGETHER = (
    ("loss", "lm_loss"),
    ("matched_similarity", "shuffled_similarity"),
    ("source_rank", "target_rank"),
    ("source_rank_centred", "target_rank_centred"),
)
_SHARES = ("eval_answer_", "retrieval")

Look = Mapping[str, tuple[str, str]]
"""For the name of each run its colour and its line style."""


def read_template(name: str) -> str:
    """The text of a file in ``templates``."""
    return (files("stepjepa.compare") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("stepjepa.compare"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "number": number}
    return environment


def render(template: str, **values: Any) -> Markup:
    """Fill in a template; every value is escaped unless it is ``Markup``."""
    return Markup(_environment().get_template(template).render(values))


def json_block(name: str, value: Any) -> Markup:
    """An element ``<script type="application/json" id=NAME>`` with data for a script; NaN and infinity become null."""
    text = json.dumps(terminal.finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup('<script type="application/json" id="{}">{}</script>').format(name, Markup(text.translate(_ESCAPED)))


def chart_text(text: object) -> str:
    """Escape a text for Plotly, which reads ``<b>``, ``<a href>`` and entities in every label as markup."""
    return escape(str(text), quote=False)


def plain(value: Any) -> str:
    """Any value on one line."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def number(value: Any, form: str = "{:,.0f}") -> str:
    """A number in a form of ``str.format``."""
    return form.format(value) if is_number(value) else UNKNOWN


def chart(name: str, label: str, traces: Sequence[Any], *, height: int = 280, **layout: Any) -> Markup:
    """A chart, which ``templates/charts.js`` draws with Plotly when it comes into view.

    Args:
        name: its ``id``.
        label: describes it to readers who don't see it.
        traces: of ``plotly.graph_objects``; texts in them have gone through :func:`chart_text`.
        height: in CSS pixels.
        layout: of Plotly, without colours, which the theme of the page decides.
    """
    from plotly import graph_objects as go

    layout |= {"hovermode": "closest", "margin": {"l": 48, "r": 12, "t": 8, "b": 40}}
    layout["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    drawn = {"data": [trace.to_plotly_json() for trace in traces], "layout": go.Layout(**layout).to_plotly_json()}
    element = '<div class="chart" id="{}" role="img" aria-label="{}" style="height:{}px"></div>{}'
    return Markup(element).format(name, label, height, json_block(f"{name}-data", drawn))


def looks(runs: Sequence[Run], comparisons: Sequence[Comparison | None]) -> Look:
    """Give each arm a colour and each of its seeds a line style; runs outside of arms get colours of their own."""
    arms = next((each.arms for each in comparisons if each is not None), ())
    places = {run.folder: (colour, seed) for colour, arm in enumerate(arms) for seed, run in enumerate(arm.runs)}
    found: dict[str, tuple[str, str]] = {}
    for run in runs:
        colour, seed = places.get(run.folder, (len(arms) + len(found), 0))
        # Where colours repeat, line styles differ.
        found[run.name] = PALETTE[colour % len(PALETTE)], DASHES[(seed + colour // len(PALETTE)) % len(DASHES)]
    return found


def curves(prefix: str, runs: Sequence[Run], columns: Sequence[str], look: Look) -> list[tuple[str, Markup]]:
    """Titles and charts of columns of ``metrics.jsonl`` over steps; of several runs each column has its own."""
    logged = [name for name in columns if any(_points(run, name)[0] for run in runs)]
    groups = [tuple(name for name in group if name in logged) for group in _TOGETHER] if len(runs) == 1 else []
    alone = [(name,) for name in logged if not any(name in group for group in groups)]
    found = []
    for place, group in enumerate(sorted(filter(None, [*groups, *alone]), key=lambda group: logged.index(group[0]))):
        percent = group[0].startswith(_SHARES)
        title = " and ".join(name.removeprefix("eval_answer_").replace("_", " ") for name in group)
        drawn = chart(
            f"{prefix}-{place}",
            f"{title} over steps",
            _traces(runs, group, look, ".1%" if percent else ".4g"),
            xaxis={"title": {"text": "step"}, "rangemode": "tozero"},
            yaxis={"tickformat": ".0%"} if percent else {},
            showlegend=len(runs) == 1 and len(group) > 1,
        )
        found.append((title, drawn))
    return found


def _traces(runs: Sequence[Run], group: Sequence[str], look: Look, form: str) -> list[Any]:
    """A line for each run and column that was logged; held-out values are dotted."""
    from plotly import graph_objects as go

    traces = []
    for run in runs:
        for place, column in enumerate(group):
            colour, dash = look[run.name] if len(runs) > 1 else (PALETTE[place], "solid")
            label = run.name if len(runs) > 1 else column.replace("_", " ")
            for name in (column, f"eval_{column}"):
                steps, values = _points(run, name)
                held_out = name != column
                if steps:
                    trace = go.Scatter(
                        x=steps,
                        y=values,
                        name=chart_text(f"{label}, held-out" if held_out else label),
                        mode="lines+markers" if held_out or len(steps) < 3 else "lines",
                        line={"color": colour, "width": 2, "dash": "dot" if held_out else dash},
                        marker={"symbol": "diamond" if held_out else "circle", "size": 6, "color": colour},
                        # By which the boxes of the legend hide a run in all charts.
                        meta={"run": run.name},
                        hovertemplate=f"step %{{x:,}}: %{{y:{form}}}<extra>%{{fullData.name}}</extra>",
                    )
                    traces.append(trace)
    return traces


def _points(run: Run, name: str) -> tuple[list[float], list[float]]:
    """Steps and values; of long lines every n-th point and the last."""
    found = [(line["step"], line[name]) for line in run.metrics if is_number(line.get(name))]
    every = -(-len(found) // POINTS) or 1
    kept = [*found[:-1:every], *found[-1:]]
    return [step for step, _ in kept], [float(f"{value:.6g}") for _, value in kept]
