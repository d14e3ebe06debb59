"""Logged numbers over steps: losses, similarity, effective ranks and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from stepjepa.pages.render import DASHES, Section, chart, chart_text, render
from stepjepa.pages.results import Compared
from stepjepa.pages.runs import Run, is_number
from stepjepa.terminal import PALETTE

POINTS = 1000
"""Most points of a line; longer ones are thinned."""

HELD_OUT = "eval_"


class Panel(NamedTuple):
    """A chart: its title, its columns of ``metrics.jsonl`` with their labels, and whether they are shares."""

    title: str
    columns: dict[str, str]
    percent: bool = False


LOSSES = (
    Panel("Loss", {"loss": "Total loss", "lm_loss": "LM loss"}),
    Panel("Alignment loss", {"jepa_loss": "Alignment loss"}),
    Panel("SIGReg loss", {"sigreg_loss": "SIGReg loss"}),
    Panel("Variance loss", {"variance_loss": "Variance loss"}),
    Panel("Covariance loss", {"covariance_loss": "Covariance loss"}),
    Panel("STP loss", {"stp_loss": "STP loss"}),
    Panel("Weight of the alignment loss", {"lbd": "Weight of the alignment loss"}),
)
REST = (
    Panel("Gradient norm", {"grad_norm": "Gradient norm"}),
    Panel("Learning rate", {"learning_rate": "Learning rate"}),
    Panel("Tokens per second", {"tokens_per_second": "Tokens per second"}),
)
REPRESENTATIONS = (
    Panel("Cosine of pairs", {"matched_similarity": "Matched pairs", "shuffled_similarity": "Shuffled pairs"}),
    Panel("Effective rank, uncentred", {"source_rank": "Rank of sources", "target_rank": "Rank of targets"}),
    Panel(
        "Effective rank, centred",
        {"source_rank_centred": "Centred rank of sources", "target_rank_centred": "Centred rank of targets"},
    ),
    Panel("Nearest target is the right one", {"retrieval_top1": "Retrieval"}, percent=True),
)

Look = Mapping[str, tuple[int, int]]
"""For the name of each run the number of its colour and of its line style."""


def looks(runs: Sequence[Run], compared: Sequence[Compared]) -> Look:
    """Give each arm a colour and each of its seeds a line style; runs outside of arms get colours of their own."""
    arms = next((each.comparison.arms for each in compared if each.comparison is not None), ())
    places = {run.folder: (colour, seed) for colour, arm in enumerate(arms) for seed, run in enumerate(arm.runs)}
    found: dict[str, tuple[int, int]] = {}
    for run in runs:
        colour, seed = places.get(run.folder, (len(arms) + len(found), 0))
        # Where colours repeat, line styles differ.
        found[run.name] = (colour, seed + colour // len(PALETTE))
    return found


def loss_section(runs: Sequence[Run], look: Look) -> Section | None:
    """Losses, scores during training, gradient norm, learning rate and speed; None where nothing was logged."""
    columns = dict.fromkeys(name for run in runs for line in run.metrics for name in line)
    scores = [name.removeprefix("eval_answer_") for name in columns if name.startswith("eval_answer_")]
    answers = (
        Panel(f"Answers during training: {score}", {f"eval_answer_{score}": f"Answers: {score}"}, percent=True)
        for score in scores
    )
    return _section("losses", "Losses over steps", runs, look, panels=[*LOSSES, *answers], rest=REST)


def representation_section(runs: Sequence[Run], look: Look) -> Section | None:
    """Similarity and effective ranks, with a warning where embeddings collapsed; None where nothing was logged."""
    collapsed = [(run.name, warning) for run in runs if (warning := _collapse(run)) is not None]
    title = "Similarity and effective rank over steps"
    return _section("representations", title, runs, look, panels=REPRESENTATIONS, collapsed=collapsed)


def _section(
    anchor: str,
    title: str,
    runs: Sequence[Run],
    look: Look,
    *,
    panels: Sequence[Panel],
    rest: Sequence[Panel] = (),
    collapsed: Sequence[tuple[str, str]] = (),
) -> Section | None:
    charts, more = _charts(anchor, runs, panels, look), _charts(f"{anchor}-rest", runs, rest, look)
    if not charts and not more:
        return None
    legend = [(run.name, PALETTE[look[run.name][0] % len(PALETTE)], look[run.name][1]) for run in runs if run.metrics]
    html = render(
        "curves.html",
        anchor=anchor,
        legend=legend if len(runs) > 1 else [],
        charts=charts,
        rest=more,
        collapsed=collapsed,
    )
    return Section(anchor, title, html)


def _collapse(run: Run) -> str | None:
    """The warning of collapsed embeddings, by the last line that logged their similarity."""
    logged = [line for line in run.metrics if is_number(line.get("shuffled_similarity"))]
    if not logged:
        return None
    from stepjepa.objectives.monitors import REMEDIES
    from stepjepa.training.callbacks import collapse

    numbers = {name: value for name, value in logged[-1].items() if is_number(value)}
    found = collapse(numbers)
    return None if found is None else f"step {numbers['step']:g}: {found}; {REMEDIES}"


def _charts(prefix: str, runs: Sequence[Run], panels: Sequence[Panel], look: Look) -> list[tuple[str, Markup]]:
    """A chart for each panel; of several runs one for each column, with a line for each run."""
    if len(runs) > 1:
        panels = [Panel(label, {name: label}, each.percent) for each in panels for name, label in each.columns.items()]
    found = []
    for place, panel in enumerate(panels):
        if traces := _traces(runs, panel, look):
            drawn = chart(
                f"{prefix}-{place}",
                f"{panel.title} over steps",
                traces,
                height=280,
                xaxis={"title": {"text": "step"}, "rangemode": "tozero"},
                yaxis={"tickformat": ".0%"} if panel.percent else {},
                showlegend=len(runs) == 1 and len(traces) > 1,
            )
            found.append((panel.title, drawn))
    return found


def _traces(runs: Sequence[Run], panel: Panel, look: Look) -> list[Any]:
    """A line for each run and column that was logged; held-out values are dotted."""
    from plotly import graph_objects as go

    traces = []
    for run in runs:
        for place, (column, label) in enumerate(panel.columns.items()):
            shown, style = (run.name, look[run.name]) if len(runs) > 1 else (label, (place, 0))
            colour, dash = PALETTE[style[0] % len(PALETTE)], DASHES[style[1] % len(DASHES)]
            for name, held_out in ((column, False), (HELD_OUT + column, True)):
                steps, values = _points(run, name)
                if steps:
                    traces.append(
                        go.Scatter(
                            x=steps,
                            y=values,
                            name=chart_text(f"{shown}, held-out" if held_out else shown),
                            mode="lines+markers" if held_out or len(steps) < 3 else "lines",
                            line={"color": colour, "width": 2, "dash": "dot" if held_out else dash},
                            marker={"symbol": "diamond" if held_out else "circle", "size": 6, "color": colour},
                            # By which the boxes of the legend hide a run in all charts.
                            meta={"run": run.name},
                            hovertemplate=f"step %{{x:,}}: %{{y{':.1%' if panel.percent else ':.4g'}}}"
                            "<extra>%{fullData.name}</extra>",
                        )
                    )
    return traces


def _points(run: Run, name: str) -> tuple[list[float], list[float]]:
    """Steps and values; of long lines every n-th point and the last."""
    found = [(line["step"], line[name]) for line in run.metrics if is_number(line.get(name))]
    every = -(-len(found) // POINTS) or 1
    kept = [*found[:-1:every], *found[-1:]]
    return [step for step, _ in kept], [float(f"{value:.6g}") for _, value in kept]
