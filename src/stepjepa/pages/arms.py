"""Arms over seeds: the comparison with the baseline, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stepjepa.errors import UserError
from stepjepa.experiments.comparison import Comparison, compare
from stepjepa.experiments.comparison_table import measure_names, tables
from stepjepa.pages.charts import PALETTE, chart, chart_text, colour
from stepjepa.pages.markup import environment
from stepjepa.pages.material import Run, sweep_names
from stepjepa.pages.scores import by_evaluation, run_axis
from stepjepa.pages.section import Section


@dataclass(frozen=True)
class Compared:
    """The runs that have an evaluation in common, compared by it.

    Attributes:
        evaluation: its name.
        comparison: of the runs; None where they can't be compared.
        reason: why they can't be.
    """

    evaluation: str
    comparison: Comparison | None
    reason: str | None


def compare_runs(runs: Sequence[Run], baseline: str | None = None) -> list[Compared]:
    """Compare the finished runs, once for each evaluation that at least two of them have.

    Args:
        runs: of the page.
        baseline: the arm that the user wants the others compared with.

    Raises:
        UserError: there is a baseline, and the runs can't be compared with it.
    """
    found = []
    for name, evaluated in by_evaluation(runs).items():
        finished = [run for run, _ in evaluated if run.get("status") == "finished"]
        if len(finished) < 2:
            continue
        try:
            found.append(Compared(name, _compare(finished, name, baseline), None))
        except UserError as error:
            if baseline is not None:
                raise
            found.append(Compared(name, None, str(error)))
    return found


def _compare(runs: Sequence[Run], evaluation: str, baseline: str | None) -> Comparison:
    """Under the names of the sweep that the runs are of, if it is one that names all arms and the baseline."""
    folders = [run.folder for run in runs]
    known = sweep_names(runs)
    if known is not None:
        names, base = known
        # Arms of several sweeps may have one name, and arms of several names may be one.
        with suppress(UserError):
            return compare(folders, evaluation=evaluation, names=names, baseline=base if baseline is None else baseline)
    return compare(folders, evaluation=evaluation, baseline=baseline)


def looks(runs: Sequence[Run], compared: Sequence[Compared]) -> dict[str, tuple[int, int]]:
    """For each run the numbers of its colour and of its line: arms have colours, their seeds lines.

    Without a comparison each run has a colour of its own.
    """
    arms = next((each.comparison.arms for each in compared if each.comparison is not None), ())
    places = {run.folder: (number, seed) for number, arm in enumerate(arms) for seed, run in enumerate(arm.runs)}
    found: dict[str, tuple[int, int]] = {}
    for run in runs:
        number, seed = places.get(run.folder, (len(arms) + len(found), 0))
        # Beyond the colours another line tells apart what has the same one.
        found[run.name] = (number, seed + number // len(PALETTE))
    return found


def arms_section(compared: Sequence[Compared]) -> Section | None:
    """Tables and pictures of the comparisons; None where there was nothing to compare."""
    if not compared:
        return None
    parts: list[dict[str, Any]] = []
    for place, each in enumerate(compared):
        part: dict[str, Any] = {"name": each.evaluation, "reason": each.reason}
        if each.comparison is not None:
            part |= {
                "tables": tables(each.comparison),
                "notes": each.comparison.notes,
                "charts": [
                    *_means(f"arms-{place}", each.comparison),
                    *_difference(f"difference-{place}", each.comparison),
                ],
            }
        parts.append(part)
    return Section("arms", "Arms over seeds", environment().get_template("arms.html").render(parts=parts))


def _height(count: int) -> int:
    return 90 + 34 * count


def _means(prefix: str, comparison: Comparison) -> list[dict[str, str]]:
    """For each measure the means with standard deviations, and a dot for each seed."""
    found = []
    for measure, name in measure_names(comparison).items():
        dots: dict[str, Any] = {"x": [], "y": [], "text": []}
        means: dict[str, Any] = {"x": [], "y": [], "text": [], "error": [], "colour": []}
        for row, arm in enumerate(comparison.arms):
            for run in arm.runs:
                mean = run.mean(measure)
                if mean is not None:
                    dots["x"].append(100 * mean)
                    dots["y"].append(row)
                    dots["text"].append(f"{chart_text(arm.name)}<br>seed {chart_text(run.seed)}: {mean:.2%}")
            spread = arm.spread(measure)
            if spread is not None:
                deviation = "" if spread.std is None else f" ± {100 * spread.std:.2f}"
                means["x"].append(100 * spread.mean)
                means["y"].append(row)
                means["error"].append(0.0 if spread.std is None else 100 * spread.std)
                means["colour"].append(colour(row))
                seeds = f"{spread.n} seed{'s' if spread.n > 1 else ''}"
                means["text"].append(f"{chart_text(arm.name)}<br>mean of {seeds}: {spread.mean:.2%}{deviation}")
        traces = [
            {
                **_markers(means),
                "error_x": {"type": "data", "array": means["error"], "thickness": 1.5, "width": 5},
                "marker": {"size": 10, "symbol": "diamond", "color": means["colour"]},
            },
            {
                **_markers(dots),
                "marker": {"size": 6, "symbol": "circle-open", "color": PALETTE[7], "line": {"width": 1.5}},
            },
        ]
        layout = _layout([arm.name for arm in comparison.arms], "share of answers", "%")
        base = comparison.baseline.spread(measure)
        if base is not None:
            layout["shapes"] = [_line(100 * base.mean)]
        label = f"{name}: mean and standard deviation of each arm"
        html = chart(f"{prefix}-{measure}", traces, layout, label=label, height=_height(len(comparison.arms)))
        found.append({"title": f"{name}, mean ± standard deviation; rings are seeds", "html": html})
    return found


def _markers(points: dict[str, Any]) -> dict[str, Any]:
    """What dots with a text each have in common."""
    known = {name: points[name] for name in ("x", "y", "text")}
    return {"type": "scatter", "mode": "markers", **known, "hovertemplate": "%{text}<extra></extra>"}


def _difference(name: str, comparison: Comparison) -> list[dict[str, str]]:
    """The differences from the baseline with their intervals, where several seeds give one."""
    x, y, above, below, texts = [], [], [], [], []
    names: list[str] = []
    colours: list[str] = []
    # As in the curves, see ``looks``.
    rows = {arm.name: row for row, arm in enumerate(comparison.arms)}
    for arm, found in comparison.differences.items():
        test = found.measures["headline"]
        if test is None or test.low is None or test.high is None:
            continue
        x.append(100 * test.mean)
        y.append(len(names))
        above.append(100 * (test.high - test.mean))
        below.append(100 * (test.mean - test.low))
        ends = f"{100 * test.mean:+.2f} [{100 * test.low:+.2f}, {100 * test.high:+.2f}]"
        texts.append(f"{chart_text(arm)}<br>{ends} points over {test.n} seeds")
        names.append(arm)
        colours.append(colour(rows[arm]))
    if not names:
        return []
    error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.5, "width": 5}
    trace = {"type": "scatter", "mode": "markers", "x": x, "y": y, "text": texts, "error_x": error}
    trace |= {
        "marker": {"size": 10, "symbol": "diamond", "color": colours},
        "hovertemplate": "%{text}<extra></extra>",
    }
    layout = _layout(names, "percentage points", "")
    layout["shapes"] = [_line(0.0)]
    what = f"{comparison.scores['headline']}: difference from {comparison.baseline.name}, 95 % interval over seeds"
    return [{"title": what, "html": chart(name, [trace], layout, label=what, height=_height(len(names)))}]


def _layout(names: Sequence[str], title: str, suffix: str) -> dict[str, Any]:
    return {
        "margin": {"l": 40, "r": 12, "t": 8, "b": 40},
        "xaxis": {"title": {"text": title}, "ticksuffix": suffix},
        "yaxis": run_axis(names),
        "showlegend": False,
    }


def _line(x: float) -> dict[str, Any]:
    """The baseline, which is the first arm, from top to bottom."""
    line = {"color": colour(0), "dash": "dash", "width": 1}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line}
