"""What evaluations came to, run by run: accuracy with intervals, lenient scores, stopping, kinds of errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepjepa.pages.cells import interval, number, percent, plain
from stepjepa.pages.charts import PALETTE, chart, chart_text
from stepjepa.pages.markup import environment
from stepjepa.pages.material import Evaluation, Run, finite
from stepjepa.pages.section import Section

Evaluated = list[tuple[Run, Evaluation]]

RIGHT = "right"
"""What an answer without an error is."""

_RIGHT_COLOUR = "#2a9d6f"
_WRONG_COLOURS = tuple(each for each in PALETTE if each != _RIGHT_COLOUR)


def by_evaluation(runs: Sequence[Run]) -> dict[str, Evaluated]:
    """The runs that have each evaluation, by its name."""
    found: dict[str, Evaluated] = {}
    for run in runs:
        for name, evaluation in run.evaluations.items():
            found.setdefault(name, []).append((run, evaluation))
    return found


def accuracy_section(runs: Sequence[Run]) -> Section | None:
    """Every score of every run, with intervals; None where nothing was evaluated.

    Args:
        runs: of the page.
    """
    parts = []
    for place, (name, evaluated) in enumerate(by_evaluation(runs).items()):
        columns, rows = score_table(evaluated)
        parts.append(
            {
                "name": name,
                "about": about(evaluated),
                "columns": columns,
                "rows": rows,
                "chart": _score_chart(f"accuracy-{place}", name, evaluated),
                "details": _details(evaluated),
            }
        )
    if not parts:
        return None
    return Section("accuracy", "Accuracy", environment().get_template("accuracy.html").render(parts=parts))


def error_section(runs: Sequence[Run]) -> Section | None:
    """How often each kind of error occurred; None where nothing was evaluated."""
    parts = []
    for place, (name, evaluated) in enumerate(by_evaluation(runs).items()):
        kinds, counted = error_counts(evaluated)
        parts.append(
            {
                "name": name,
                "columns": ["run", "answers", *kinds],
                "rows": [
                    [
                        run.name,
                        number(sum(counts)),
                        *(f"{number(count)} ({percent(count / sum(counts))})" for count in counts),
                    ]
                    for (run, _), counts in zip(evaluated, counted, strict=True)
                ],
                "chart": _error_chart(f"errors-{place}", name, evaluated, kinds, counted),
            }
        )
    if not parts:
        return None
    return Section("errors", "Errors by kind", environment().get_template("errors.html").render(parts=parts))


def about(evaluated: Evaluated) -> str:
    """What was asked, in a sentence."""
    said = dict.fromkeys(
        f"{number(each.summary['n'])} examples of {plain(each.summary.get('test_file'))}, task "
        f"{plain(each.summary.get('task'))}, decided by {each.summary['headline']}"
        for _, each in evaluated
    )
    return "; ".join(said)


def score_table(evaluated: Evaluated) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: the headline and the lenient score first, then the others, stopping, losses, similarity."""
    names = dict.fromkeys(each.summary[which] for _, each in evaluated for which in ("headline", "lenient"))
    names |= dict.fromkeys(name for _, each in evaluated for name in each.summary["scores"])
    called = {"stopped": "stopped by itself"}
    rows = []
    for run, each in evaluated:
        summary, similarity = each.summary, each.summary.get("similarity")
        similarity = similarity if isinstance(similarity, dict) else {}
        cells = [interval(summary["scores"].get(name)) for name in names]
        cells += [percent(summary.get("ran_on")), number(summary.get("gold_loss"), "{:.3f}")]
        cells += [number(similarity.get(f"{kind}_similarity"), "{:.3f}") for kind in ("matched", "shuffled")]
        rows.append([run.name, *cells])
    heads = ["run", *(called.get(name, name) for name in names), "ran on", "LM loss on right answers"]
    return [*heads, "cosine, matched", "cosine, shuffled"], rows


def error_counts(evaluated: Evaluated) -> tuple[list[str], list[list[int]]]:
    """Kinds, :data:`RIGHT` first, then from the most frequent one; a row of counts for each run."""
    counted: list[dict[str, int]] = []
    for _, each in evaluated:
        errors = each.summary.get("errors")
        known = errors.items() if isinstance(errors, dict) else ()
        wrong = {str(kind): count for kind, count in known if isinstance(count, int) and count > 0}
        counted.append({RIGHT: max(each.summary["n"] - sum(wrong.values()), 0), **wrong})
    totals: dict[str, int] = {}
    for counts in counted:
        for kind, count in counts.items():
            totals[kind] = totals.get(kind, 0) + count
    kinds = sorted(totals, key=lambda kind: (kind != RIGHT, -totals[kind]))
    return kinds, [[counts.get(kind, 0) for kind in kinds] for counts in counted]


def run_axis(names: Sequence[str]) -> dict[str, Any]:
    """A vertical axis of names from top to bottom, long ones shortened at the front, where they are most alike."""
    shown = [name if len(name) <= 28 else f"…{name[-27:]}" for name in names]
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [chart_text(name) for name in shown],
        "range": [len(names) - 0.5, -0.5],
    }


def _score_chart(name: str, evaluation: str, evaluated: Evaluated) -> str:
    """The headline, the lenient score and stopping, with intervals."""
    kinds = [("headline", 0), ("lenient", 1), ("stopped", 2)]
    traces: list[dict[str, Any]] = []
    for kind, place in kinds:
        x, y, above, below, texts = [], [], [], [], []
        title = ""
        for row, (run, each) in enumerate(evaluated):
            score_name = each.summary.get(kind) if kind != "stopped" else "stopped"
            score = each.summary["scores"].get(score_name)
            if score is None or (kind == "lenient" and score_name == each.summary["headline"]):
                continue
            title = (
                f"{score_name} (lenient)"
                if kind == "lenient"
                else "stopped by itself"
                if kind == "stopped"
                else str(score_name)
            )
            x.append(100 * score["mean"])
            y.append(row + 0.22 * (place - 1))
            known = finite(score["low"]) and finite(score["high"])
            above.append(100 * (score["high"] - score["mean"]) if known else 0.0)
            below.append(100 * (score["mean"] - score["low"]) if known else 0.0)
            texts.append(f"{chart_text(run.name)}<br>{chart_text(title)}: {interval(score)}")
        if x:
            error = {
                "type": "data",
                "symmetric": False,
                "array": above,
                "arrayminus": below,
                "thickness": 1.5,
                "width": 4,
            }
            symbol = ("circle", "circle-open", "square-open")[place]
            marker = {"color": PALETTE[place], "size": 9, "symbol": symbol, "line": {"width": 2}}
            trace = {
                "type": "scatter",
                "mode": "markers",
                "x": x,
                "y": y,
                "text": texts,
                "error_x": error,
                "marker": marker,
            }
            traces.append({**trace, "name": chart_text(title), "hovertemplate": "%{text}<extra></extra>"})
    layout = {
        "margin": {"l": 40, "r": 12, "t": 8, "b": 40},
        "xaxis": {"title": {"text": "share of answers"}, "ticksuffix": "%", "range": [-2, 102]},
        "yaxis": run_axis([run.name for run, _ in evaluated]),
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    height = 130 + 46 * len(evaluated)
    return chart(name, traces, layout, label=f"Scores of {evaluation} with 95 % intervals", height=height)


def _error_chart(
    name: str, evaluation: str, evaluated: Evaluated, kinds: Sequence[str], counted: Sequence[Sequence[int]]
) -> str:
    """A bar of shares for each run."""
    names = [run.name for run, _ in evaluated]
    traces: list[dict[str, Any]] = []
    for place, kind in enumerate(kinds):
        fill = _RIGHT_COLOUR if kind == RIGHT else _WRONG_COLOURS[(place - 1) % len(_WRONG_COLOURS)]
        texts = [
            f"{chart_text(run)}<br>{chart_text(kind)}: {counts[place]:,} of {sum(counts):,}"
            for run, counts in zip(names, counted, strict=True)
        ]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": chart_text(kind),
                "x": [100 * counts[place] / max(sum(counts), 1) for counts in counted],
                "y": list(range(len(names))),
                "text": texts,
                "textposition": "none",
                "marker": {"color": fill},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "margin": {"l": 40, "r": 12, "t": 8, "b": 40},
        "xaxis": {"title": {"text": "share of answers"}, "ticksuffix": "%", "range": [0, 100]},
        "yaxis": run_axis(names),
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    }
    return chart(name, traces, layout, label=f"Kinds of errors of {evaluation}", height=130 + 32 * len(names))


def _details(evaluated: Evaluated) -> list[tuple[str, list[tuple[str, str]]]]:
    """What tasks count beside their scores."""
    found = []
    for run, each in evaluated:
        details = each.summary.get("details")
        if isinstance(details, dict) and details:
            found.append((run.name, [(str(name), plain(value)) for name, value in details.items()]))
    return found
