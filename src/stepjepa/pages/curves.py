"""What was logged while a run went: losses, similarity, effective ranks and the rest, over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepjepa.pages.cells import number, percent
from stepjepa.pages.charts import chart, chart_text, colour, dash
from stepjepa.pages.markup import environment
from stepjepa.pages.material import Run, finite
from stepjepa.pages.section import Section

POINTS = 1000
"""Most points of a line: more than a screen shows. Of longer ones every so many is drawn, and the last."""

HELD_OUT = "eval_"
"""What the names of held-out numbers begin with, beside the same name without it."""


@dataclass(frozen=True)
class Panel:
    """What one chart shows.

    Attributes:
        title: of the chart.
        names: of the numbers of a log line, and what to call each of them.
        percent: they are shares.
    """

    title: str
    names: tuple[tuple[str, str], ...]
    percent: bool = False


LOSSES = (
    Panel("Loss", (("loss", "total"), ("lm_loss", "LM loss"))),
    Panel("Alignment loss", (("jepa_loss", "alignment loss"),)),
    Panel("SIGReg loss", (("sigreg_loss", "SIGReg loss"),)),
    Panel("Variance loss", (("variance_loss", "variance loss"),)),
    Panel("Covariance loss", (("covariance_loss", "covariance loss"),)),
    Panel("STP loss", (("stp_loss", "STP loss"),)),
    Panel("Weight of the alignment loss", (("lbd", "lbd"),)),
)

REPRESENTATIONS = (
    Panel("Cosine of pairs", (("matched_similarity", "matched pairs"), ("shuffled_similarity", "shuffled pairs"))),
    Panel("Effective rank, uncentred", (("source_rank", "sources"), ("target_rank", "targets"))),
    Panel("Effective rank, centred", (("source_rank_centred", "sources"), ("target_rank_centred", "targets"))),
    Panel("Nearest target is the right one", (("retrieval_top1", "retrieval"),), percent=True),
)

REST = (
    Panel("Gradient norm", (("grad_norm", "gradient norm"),)),
    Panel("Learning rate", (("learning_rate", "learning rate"),)),
    Panel("Tokens per second", (("tokens_per_second", "tokens per second"),)),
)

Look = Mapping[str, tuple[int, int]]
"""For the name of each run the number of its colour and of its line."""


def loss_section(runs: Sequence[Run], look: Look) -> Section | None:
    """The parts of the loss, speed and learning rate over steps; None where nothing was logged.

    Args:
        runs: of the page.
        look: of all of them.
    """
    charts, rest = _charts("loss", runs, _with_answers(runs), look), _charts("rest", runs, REST, look)
    if not charts and not rest:
        return None
    last = last_values(runs, [*_with_answers(runs), *REST])
    held_out = _is_held_out(runs, LOSSES)
    html = _render(runs, look, charts=charts, rest=rest, held_out=held_out, about="loss", last=last)
    return Section("losses", "Losses over steps", html)


def representation_section(runs: Sequence[Run], look: Look) -> Section | None:
    """Similarity and effective ranks over steps, with a warning where they collapsed; None where nothing was logged."""
    charts = _charts("views", runs, REPRESENTATIONS, look)
    if not charts:
        return None
    html = _render(
        runs,
        look,
        charts=charts,
        rest=[],
        held_out=_is_held_out(runs, REPRESENTATIONS),
        about="representation",
        last=last_values(runs, REPRESENTATIONS),
        collapsed=[(run.name, said) for run in runs if (said := _collapse(run)) is not None],
    )
    return Section("representations", "Similarity and effective rank over steps", html)


def _render(runs: Sequence[Run], look: Look, **values: Any) -> str:
    legend = [(run.name, colour(look[run.name][0]), look[run.name][1]) for run in runs if run.metrics]
    values.setdefault("collapsed", [])
    thinned = any(len(run.metrics) > POINTS for run in runs)
    return (
        environment()
        .get_template("curves.html")
        .render(legend=legend if len(runs) > 1 else [], thinned=thinned, points=POINTS, **values)
    )


def last_values(runs: Sequence[Run], panels: Sequence[Panel]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table of what was logged last, for those who don't see the charts, too."""
    named = [
        (prefix + name, _title(panel, called) + (", held-out" if prefix else ""), panel.percent)
        for panel in panels
        for name, called in panel.names
        for prefix in ("", HELD_OUT)
    ]
    known = {name for run in runs for line in run.metrics for name, value in line.items() if finite(value)}
    named = [each for each in named if each[0] in known]
    rows = []
    for run in runs:
        cells = []
        for name, _, is_share in named:
            value = next((line[name] for line in reversed(run.metrics) if finite(line.get(name))), None)
            cells.append(percent(value) if is_share else number(value, "{:,.4g}"))
        rows.append([run.name, *cells])
    return ["run", *(title for _, title, _ in named)], rows


def _with_answers(runs: Sequence[Run]) -> tuple[Panel, ...]:
    """The losses, and a panel for each score of answers during training."""
    names = dict.fromkeys(
        name for run in runs for line in run.metrics for name in line if name.startswith("eval_answer_")
    )
    scores = [name.removeprefix("eval_answer_") for name in names]
    return (
        *LOSSES,
        *(
            Panel(f"Answers during training: {score}", ((f"eval_answer_{score}", score),), percent=True)
            for score in scores
        ),
    )


def _collapse(run: Run) -> str | None:
    """The last line of a run that says that its embeddings are collapsed; None where the last that tells doesn't."""
    told = [line for line in run.metrics if finite(line.get("shuffled_similarity"))]
    if not told:
        return None
    from stepjepa.objectives.monitors import REMEDIES
    from stepjepa.training.callbacks import collapse

    numbers = {name: value for name, value in told[-1].items() if finite(value)}
    found = collapse(numbers)
    return None if found is None else f"step {numbers['step']:g}: {found}; {REMEDIES}"


def _is_held_out(runs: Sequence[Run], panels: Sequence[Panel]) -> bool:
    names = {f"{HELD_OUT}{name}" for panel in panels for name, _ in panel.names}
    return any(names & set(line) for run in runs for line in run.metrics)


def _charts(prefix: str, runs: Sequence[Run], panels: Sequence[Panel], look: Look) -> list[dict[str, str]]:
    """A chart for each panel of one run; of several runs one for each number, with a line for each run."""
    if len(runs) > 1:
        panels = [
            Panel(_title(panel, called), ((name, called),), panel.percent)
            for panel in panels
            for name, called in panel.names
        ]
    found = []
    for place, panel in enumerate(panels):
        traces = _traces(runs, panel, look)
        if traces:
            named = len(runs) == 1 and len(traces) > 1
            html = chart(
                f"{prefix}-{place}", traces, _layout(panel, named), label=f"{panel.title} over steps", height=280
            )
            found.append({"title": panel.title, "html": html})
    return found


def _title(panel: Panel, called: str) -> str:
    if len(panel.names) == 1:
        return panel.title
    return {"total": "Total loss", "LM loss": "LM loss"}.get(called, f"{panel.title}: {called}")


def _traces(runs: Sequence[Run], panel: Panel, look: Look) -> list[dict[str, Any]]:
    traces = []
    for run in runs:
        for place, (name, called) in enumerate(panel.names):
            first, line = look[run.name] if len(runs) > 1 else (place, 0)
            for held_out in (False, True):
                steps, values = _points(run, HELD_OUT + name if held_out else name)
                if not steps:
                    continue
                shown = run.name if len(runs) > 1 else called
                label = chart_text(f"{shown}, held-out" if held_out else shown)
                drawn: dict[str, Any] = {"color": colour(first), "width": 2, "dash": "dot" if held_out else dash(line)}
                trace = {"type": "scatter", "x": steps, "y": values, "name": label, "line": drawn}
                trace["mode"] = "lines+markers" if held_out or len(steps) < 3 else "lines"
                if held_out:
                    trace["marker"] = {"symbol": "diamond", "size": 6, "color": colour(first)}
                trace["meta"] = {"run": run.name}
                form = ":.1%" if panel.percent else ":.4g"
                trace["hovertemplate"] = f"step %{{x:,}}: %{{y{form}}}<extra>%{{fullData.name}}</extra>"
                traces.append(trace)
    return traces


def _points(run: Run, name: str) -> tuple[list[float], list[float]]:
    """Steps and values, thinned."""
    found = [(line["step"], line[name]) for line in run.metrics if finite(line.get(name))]
    every = -(-len(found) // POINTS)
    kept = [*found[: -1 : every or 1], *found[-1:]]
    return [step for step, _ in kept], [float(f"{value:.6g}") for _, value in kept]


def _layout(panel: Panel, named: bool) -> dict[str, Any]:
    return {
        "margin": {"l": 48, "r": 12, "t": 8, "b": 40},
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero"},
        "yaxis": {"tickformat": ".0%"} if panel.percent else {},
        "showlegend": named,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
    }
