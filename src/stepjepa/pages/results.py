"""Results of evaluations: arms compared with the baseline over seeds, scores of each run, kinds of errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from stepjepa.errors import UserError
from stepjepa.experiments.comparison import Comparison
from stepjepa.experiments.comparison_table import tables
from stepjepa.experiments.verdict import verdict
from stepjepa.pages.render import Section, chart, chart_text, interval, names_axis, number, plain, render
from stepjepa.pages.runs import Evaluation, Run, compare_folders
from stepjepa.terminal import PALETTE

RIGHT = "right"
"""The kind of an answer without an error."""
_RIGHT_COLOUR = PALETTE[2]
_WRONG_COLOURS = tuple(each for each in PALETTE if each != _RIGHT_COLOUR)

Evaluated = list[tuple[Run, Evaluation]]


class Compared(NamedTuple):
    """The runs that share an evaluation: their comparison, or the reason why they can't be compared."""

    evaluation: str
    comparison: Comparison | None
    reason: str | None


class Dot(NamedTuple):
    """A point of a chart, in percent, with the ends of its interval."""

    x: float
    row: float
    text: str
    colour: str
    low: float | None = None
    high: float | None = None


def by_evaluation(runs: Sequence[Run]) -> dict[str, Evaluated]:
    """The runs that have each evaluation, by its name."""
    found: dict[str, Evaluated] = {}
    for run in runs:
        for name, evaluation in run.evaluations.items():
            found.setdefault(name, []).append((run, evaluation))
    return found


def compare_runs(runs: Sequence[Run], baseline: str | None = None) -> list[Compared]:
    """Compare the finished runs, once for each evaluation that at least two of them have.

    Raises:
        UserError: the user named a baseline, and the runs can't be compared with it.
    """
    found = []
    for name, evaluated in by_evaluation(runs).items():
        finished = [run for run, _ in evaluated if run.get("status") == "finished"]
        if len(finished) < 2:
            continue
        try:
            found.append(Compared(name, compare_folders(finished, baseline, evaluation=name), None))
        except UserError as error:
            if baseline is not None:
                raise
            found.append(Compared(name, None, str(error)))
    return found


def comparison_section(compared: Sequence[Compared]) -> Section | None:
    """The verdict, the tables and the charts of each comparison; None where there was nothing to compare."""
    if not compared:
        return None
    parts: list[dict[str, Any]] = []
    for place, (evaluation, comparison, reason) in enumerate(compared):
        part: dict[str, Any] = {"name": evaluation, "reason": reason}
        if comparison is not None:
            charts = [_mean_chart(f"arms-{place}", comparison), *_difference_chart(f"difference-{place}", comparison)]
            part |= {"verdict": verdict(comparison), "tables": tables(comparison), "charts": charts}
            part["notes"] = comparison.notes
        parts.append(part)
    return Section("arms", "Arms over seeds", render("arms.html", parts=parts))


def _mean_chart(name: str, comparison: Comparison) -> tuple[str, Markup]:
    """The mean and standard deviation of the headline of each arm, and a ring for each seed."""
    means, rings = [], []
    for row, arm in enumerate(comparison.arms):
        spread = arm.spread("headline")
        if spread is not None:
            mean, std = 100 * spread.mean, 100 * (spread.std or 0.0)
            text = f"{chart_text(arm.name)}<br>{mean:.2f}% ± {std:.2f} over {spread.n} seeds"
            means.append(Dot(mean, row, text, _colour(row), mean - std, mean + std))
        for run in arm.runs:
            if (share := run.mean("headline")) is not None:
                text = f"{chart_text(arm.name)}<br>seed {chart_text(run.seed)}: {share:.2%}"
                rings.append(Dot(100 * share, row, text, PALETTE[-1]))
    title = f"{comparison.scores['headline']}, mean ± standard deviation; rings are seeds"
    traces = [_dots(means), _dots(rings, symbol="circle-open", size=6)]
    return title, _rows_chart(name, title, traces, [arm.name for arm in comparison.arms], means[0].x if means else None)


def _difference_chart(name: str, comparison: Comparison) -> list[tuple[str, Markup]]:
    """The differences from the baseline with their intervals, where several seeds give one."""
    colours = {arm.name: _colour(row) for row, arm in enumerate(comparison.arms)}
    dots: list[Dot] = []
    names: list[str] = []
    for arm, difference in comparison.differences.items():
        test = difference.measures["headline"]
        if test is not None and test.low is not None and test.high is not None:
            mean, low, high = 100 * test.mean, 100 * test.low, 100 * test.high
            text = f"{chart_text(arm)}<br>{mean:+.2f} [{low:+.2f}, {high:+.2f}] points over {test.n} seeds"
            dots.append(Dot(mean, len(names), text, colours[arm], low, high))
            names.append(arm)
    if not dots:
        return []
    title = f"{comparison.scores['headline']}: difference from {comparison.baseline.name}, 95 % interval over seeds"
    return [(title, _rows_chart(name, title, [_dots(dots)], names, 0.0, unit="percentage points"))]


def accuracy_section(runs: Sequence[Run]) -> Section | None:
    """Every score of every run with its interval; None where nothing was evaluated."""
    parts = []
    for place, (name, evaluated) in enumerate(by_evaluation(runs).items()):
        columns, rows = score_table(evaluated)
        about = "; ".join(
            dict.fromkeys(
                f"{number(each.summary['n'])} examples of {plain(each.summary.get('test_file'))}, task "
                f"{plain(each.summary.get('task'))}, decided by {each.summary['headline']}"
                for _, each in evaluated
            )
        )
        details = [(run.name, each.summary.get("details")) for run, each in evaluated]
        parts.append(
            {
                "name": name,
                "about": about,
                "columns": columns,
                "rows": rows,
                "chart": _score_chart(f"accuracy-{place}", name, evaluated),
                "details": [(run, found) for run, found in details if isinstance(found, dict) and found],
            }
        )
    return Section("accuracy", "Accuracy", render("accuracy.html", parts=parts)) if parts else None


def score_table(evaluated: Evaluated) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the headline and the lenient score first, then the others, losses and similarity."""
    names = dict.fromkeys(each.summary[which] for _, each in evaluated for which in ("headline", "lenient"))
    names |= dict.fromkeys(name for _, each in evaluated for name in each.summary["scores"])
    rows = []
    for run, each in evaluated:
        summary, similarity = each.summary, each.summary.get("similarity")
        similarity = similarity if isinstance(similarity, dict) else {}
        cells = [interval(summary["scores"].get(name)) for name in names]
        cells += [number(summary.get("ran_on"), "{:.1%}"), number(summary.get("gold_loss"), "{:.3f}")]
        cells += [number(similarity.get(f"{kind}_similarity"), "{:.3f}") for kind in ("matched", "shuffled")]
        rows.append([run.name, *cells])
    heads = ["stopped by itself" if name == "stopped" else name for name in names]
    return ["run", *heads, "ran on", "LM loss on right answers", "cosine, matched", "cosine, shuffled"], rows


def _score_chart(name: str, evaluation: str, evaluated: Evaluated) -> Markup:
    """The headline of each run."""
    dots = []
    for row, (run, each) in enumerate(evaluated):
        score = each.summary["scores"][each.summary["headline"]]
        low, high = (None if score[end] is None else 100 * score[end] for end in ("low", "high"))
        text = f"{chart_text(run.name)}<br>{chart_text(each.summary['headline'])}: {interval(score)}"
        dots.append(Dot(100 * score["mean"], row, text, PALETTE[0], low, high))
    label = f"Headline score of {evaluation} with 95 % intervals"
    return _rows_chart(name, label, [_dots(dots)], [run.name for run, _ in evaluated])


def error_section(runs: Sequence[Run]) -> Section | None:
    """How often each kind of error occurred; None where nothing was evaluated."""
    from plotly import graph_objects as go

    parts = []
    for place, (evaluation, evaluated) in enumerate(by_evaluation(runs).items()):
        names = [run.name for run, _ in evaluated]
        kinds, counted = error_counts(evaluated)
        totals = [max(sum(counts), 1) for counts in counted]
        traces: list[Any] = []
        for kind, counts in zip(kinds, zip(*counted, strict=True), strict=True):
            shares = [100 * count / total for count, total in zip(counts, totals, strict=True)]
            colour = _RIGHT_COLOUR if kind == RIGHT else _WRONG_COLOURS[(len(traces) - 1) % len(_WRONG_COLOURS)]
            hover = "%{fullData.name}: %{x:.1f}%<extra></extra>"
            bar = go.Bar(orientation="h", name=chart_text(kind), x=shares, y=list(range(len(names))))
            traces.append(bar.update(marker={"color": colour}, hovertemplate=hover))
        label = f"Kinds of errors of {evaluation}"
        drawn = _rows_chart(f"errors-{place}", label, traces, names, barmode="stack", bargap=0.35, showlegend=True)
        rows = [
            [name, number(total), *(f"{number(count)} ({count / total:.1%})" for count in counts)]
            for name, total, counts in zip(names, totals, counted, strict=True)
        ]
        parts.append({"name": evaluation, "columns": ["run", "answers", *kinds], "rows": rows, "chart": drawn})
    return Section("errors", "Errors by kind", render("errors.html", parts=parts)) if parts else None


def error_counts(evaluated: Evaluated) -> tuple[list[str], list[list[int]]]:
    """The kinds, :data:`RIGHT` first and then by frequency, and for each run the count of each kind."""
    counted: list[Counter[str]] = []
    for _, each in evaluated:
        errors = each.summary.get("errors")
        known = errors.items() if isinstance(errors, dict) else ()
        wrong = Counter({str(kind): count for kind, count in known if isinstance(count, int) and count > 0})
        counted.append(Counter({RIGHT: max(each.summary["n"] - wrong.total(), 0)}) + wrong)
    kinds = [RIGHT, *(kind for kind, _ in sum(counted, Counter()).most_common() if kind != RIGHT)]
    return kinds, [[counts[kind] for kind in kinds] for counts in counted]


def _colour(row: int) -> str:
    return PALETTE[row % len(PALETTE)]


def _dots(dots: Sequence[Dot], *, symbol: str = "diamond", size: int = 10) -> Any:
    """A Plotly trace of points with their intervals."""
    from plotly import graph_objects as go

    error_bars = {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if dot.high is None else dot.high - dot.x for dot in dots],
        "arrayminus": [0.0 if dot.low is None else dot.x - dot.low for dot in dots],
        # Visible on either background.
        "color": PALETTE[-1],
        "thickness": 1.5,
        "width": 5,
    }
    return go.Scatter(
        mode="markers",
        x=[dot.x for dot in dots],
        y=[dot.row for dot in dots],
        text=[dot.text for dot in dots],
        hovertemplate="%{text}<extra></extra>",
        error_x=None if all(dot.low is None for dot in dots) else error_bars,
        marker={"size": size, "symbol": symbol, "color": [dot.colour for dot in dots]},
    )


def _rows_chart(
    name: str,
    label: str,
    traces: Sequence[Any],
    names: Sequence[str],
    line: float | None = None,
    *,
    unit: str = "% of answers",
    showlegend: bool = False,
    **layout: Any,
) -> Markup:
    """A chart with a named row for each run or arm, and a dashed vertical line where the baseline is."""
    if line is not None:
        style = {"color": PALETTE[0], "dash": "dash", "width": 1}
        layout["shapes"] = [
            {"type": "line", "yref": "paper", "x0": line, "x1": line, "y0": 0, "y1": 1, "line": style},
        ]
    height = 100 + 30 * showlegend + 34 * len(names)
    axes = {"xaxis": {"title": {"text": unit}}, "yaxis": names_axis(names)}
    return chart(name, label, traces, height=height, showlegend=showlegend, **axes, **layout)
