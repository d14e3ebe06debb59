"""Render templates, data and charts as safe markup: text of users, models and files never becomes HTML."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from stepjepa.base import terminal
from stepjepa.base.terminal import PALETTE
from stepjepa.study.arms import ComparedArms
from stepjepa.study.page.logged_run import Run, is_number

DASHES = {"solid": "none", "dash": "8 4", "dot": "3 3", "dashdot": "8 3 3 3", "longdash": "12 4"}
"""Plotly line style -> its SVG dash array. Line styles distinguish runs beside their colours."""

POINTS = 1000
"""Maximum number of points of a line; longer lines are thinned."""

_SHARES = ("eval_answer_", "retrieval")

Look = Mapping[str, tuple[str, str]]
"""Name of a run -> its colour and line style."""


def read_template(name: str) -> str:
    """Return the text of a file in ``templates``."""
    return (files("stepjepa.study.page") / "templates" / name).read_text(encoding="utf-8")


def render(template: str, **values: object) -> Markup:
    """Fill in a template; escape every value that is not ``Markup``, including control characters."""
    loader = PackageLoader("stepjepa.study.page")
    environment = Environment(loader=loader, autoescape=True, finalize=_visible, trim_blocks=True, lstrip_blocks=True)
    return Markup(environment.get_template(template).render(values))


def _visible(value: object) -> object:
    """Return the value as the page shows it: control characters are made visible unless it is ``Markup``."""
    return terminal.visible_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def json_block(name: str, value: object) -> Markup:
    """Return an element ``<script type="application/json" id=NAME>`` with data; NaN and infinity become null."""
    text = htmlsafe_json_dumps(terminal.finite(value), allow_nan=False, separators=(",", ":"))
    return Markup('<script type="application/json" id="{}">{}</script>').format(name, text)


def chart_text(text: object) -> str:
    """Escape a text for Plotly, which reads ``<b>``, ``<a href>`` and entities in every label as markup."""
    return escape(terminal.visible_lines(str(text)), quote=False)


def looks(runs: Sequence[Run], comparison: ComparedArms | None) -> Look:
    """Assign a colour to each arm and a line style to each of its seeds; runs outside of arms get separate colours."""
    arms = comparison.arms if comparison else ()
    places = {run.folder: (colour, seed) for colour, arm in enumerate(arms) for seed, run in enumerate(arm.runs)}
    assigned: dict[str, tuple[str, str]] = {}
    for run in runs:
        colour, seed = places.get(run.folder, (len(arms) + len(assigned), 0))
        # Where colours repeat, line styles differ.
        dash = list(DASHES)[(seed + colour // len(PALETTE)) % len(DASHES)]
        assigned[run.name] = PALETTE[colour % len(PALETTE)], dash
    return assigned


def curves(runs: Sequence[Run], columns: Sequence[str], look: Look) -> list[tuple[str, Markup]]:
    """Return titles and charts of columns of ``metrics.jsonl`` over steps.

    ``templates/charts.js`` draws them with Plotly when they come into view; the theme gives the colours.
    """
    from plotly import graph_objects as go

    charts = []
    for place, column in enumerate(name for name in columns if any(_points(run, name)[0] for run in runs)):
        percent = column.startswith(_SHARES)
        title = terminal.visible_lines(column.removeprefix("eval_answer_").replace("_", " "))
        traces = [trace for run in runs for trace in _traces(run, column, *look[run.name], percent)]
        layout = go.Layout(
            hovermode="closest",
            margin={"l": 48, "r": 12, "t": 8, "b": 40},
            xaxis={"title": {"text": "step"}, "rangemode": "tozero"},
            yaxis={"tickformat": ".0%"} if percent else {},
            showlegend=False,
        )
        figure = {"data": [trace.to_plotly_json() for trace in traces], "layout": layout.to_plotly_json()}
        element = '<div class="chart" id="{}" role="img" aria-label="{} over steps" style="height:280px"></div>{}'
        name = f"steps-{place}"
        charts.append((title, Markup(element).format(name, title, json_block(f"{name}-data", figure))))
    return charts


def _traces(run: Run, column: str, colour: str, dash: str, percent: bool) -> list[Any]:
    """Return the line of a column, and a dotted line of its held-out values."""
    from plotly import graph_objects as go

    traces = []
    for name, held_out in ((column, False), (f"eval_{column}", True)):
        steps, values = _points(run, name)
        if steps:
            trace = go.Scatter(
                x=steps,
                y=values,
                name=chart_text(f"{run.name}, held-out" if held_out else run.name),
                mode="lines+markers" if held_out or len(steps) < 3 else "lines",
                line={"color": colour, "width": 2, "dash": "dot" if held_out else dash},
                marker={"symbol": "diamond" if held_out else "circle", "size": 6, "color": colour},
                # The checkboxes of the legend use this name to hide a run in all charts.
                meta={"run": terminal.visible_lines(run.name)},
                hovertemplate=f"step %{{x:,}}: %{{y:{'.1%' if percent else '.4g'}}}<extra>%{{fullData.name}}</extra>",
            )
            traces.append(trace)
    return traces


def _points(run: Run, name: str) -> tuple[list[float], list[float]]:
    """Return steps and values; of long lines only every n-th point and the last."""
    points = [(line["step"], line[name]) for line in run.metrics if is_number(line.get(name))]
    every = -(-len(points) // POINTS) or 1
    thinned = [*points[:-1:every], *points[-1:]]
    return [step for step, _ in thinned], [float(f"{value:.6g}") for _, value in thinned]
