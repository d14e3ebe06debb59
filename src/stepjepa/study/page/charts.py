"""Templates, data and charts as safe markup: nothing that a user, a model or a file said becomes HTML."""

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
"""Line styles of Plotly, which tell apart what colour alone would, and how SVG names them."""

POINTS = 1000
"""Most points of a line; longer ones are thinned."""

_SHARES = ("eval_answer_", "retrieval")

Look = Mapping[str, tuple[str, str]]
"""For the name of each run its colour and its line style."""


def read_template(name: str) -> str:
    """The text of a file in ``templates``."""
    return (files("stepjepa.study.page") / "templates" / name).read_text(encoding="utf-8")


def render(template: str, **values: Any) -> Markup:
    """Fill in a template; every value is escaped unless it is ``Markup``, control characters in it, too."""
    loader = PackageLoader("stepjepa.study.page")
    environment = Environment(loader=loader, autoescape=True, finalize=_visible, trim_blocks=True, lstrip_blocks=True)
    return Markup(environment.get_template(template).render(values))


def _visible(value: object) -> object:
    """The value as a page shows it: a text that is no ``Markup`` without control characters."""
    return terminal.visible_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def json_block(name: str, value: object) -> Markup:
    """An element ``<script type="application/json" id=NAME>`` with data for a script; NaN and infinity become null."""
    text = htmlsafe_json_dumps(terminal.finite(value), allow_nan=False, separators=(",", ":"))
    return Markup('<script type="application/json" id="{}">{}</script>').format(name, text)


def chart_text(text: object) -> str:
    """Escape a text for Plotly, which reads ``<b>``, ``<a href>`` and entities in every label as markup."""
    return escape(terminal.visible_lines(str(text)), quote=False)


def looks(runs: Sequence[Run], comparison: ComparedArms | None) -> Look:
    """Give each arm a colour and each of its seeds a line style; runs outside of arms get colours of their own."""
    arms = comparison.arms if comparison else ()
    places = {run.folder: (colour, seed) for colour, arm in enumerate(arms) for seed, run in enumerate(arm.runs)}
    found: dict[str, tuple[str, str]] = {}
    for run in runs:
        colour, seed = places.get(run.folder, (len(arms) + len(found), 0))
        # Where colours repeat, line styles differ.
        dash = list(DASHES)[(seed + colour // len(PALETTE)) % len(DASHES)]
        found[run.name] = PALETTE[colour % len(PALETTE)], dash
    return found


def curves(runs: Sequence[Run], columns: Sequence[str], look: Look) -> list[tuple[str, Markup]]:
    """Titles and charts of columns of ``metrics.jsonl`` over steps.

    ``templates/charts.js`` draws them with Plotly when they come into view; the theme gives the colours.
    """
    from plotly import graph_objects as go

    found = []
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
        drawn = {"data": [trace.to_plotly_json() for trace in traces], "layout": layout.to_plotly_json()}
        element = '<div class="chart" id="{}" role="img" aria-label="{} over steps" style="height:280px"></div>{}'
        name = f"steps-{place}"
        found.append((title, Markup(element).format(name, title, json_block(f"{name}-data", drawn))))
    return found


def _traces(run: Run, column: str, colour: str, dash: str, percent: bool) -> list[Any]:
    """The line of a column and, dotted, that of its held-out values."""
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
                # By which the boxes of the legend hide a run in all charts.
                meta={"run": terminal.visible_lines(run.name)},
                hovertemplate=f"step %{{x:,}}: %{{y:{'.1%' if percent else '.4g'}}}<extra>%{{fullData.name}}</extra>",
            )
            traces.append(trace)
    return traces


def _points(run: Run, name: str) -> tuple[list[float], list[float]]:
    """Steps and values; of long lines every n-th point and the last."""
    found = [(line["step"], line[name]) for line in run.metrics if is_number(line.get(name))]
    every = -(-len(found) // POINTS) or 1
    kept = [*found[:-1:every], *found[-1:]]
    return [step for step, _ in kept], [float(f"{value:.6g}") for _, value in kept]
