"""Charts of the columns of ``metrics.jsonl`` over steps, which ``templates/charts.js`` draws."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from markupsafe import Markup

from stepjepa.base import terminal
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import PALETTE
from stepjepa.evaluation.summary_text import score_words
from stepjepa.store.metric_names import HELD_OUT, set_and_metric
from stepjepa.study.arms import ComparedArms
from stepjepa.study.page.logged_run import LoggedRun, is_number
from stepjepa.study.page.markup import json_block

DASHES = {"solid": "none", "dash": "8 4", "dashdot": "8 3 3 3", "longdash": "14 4", "dashdotdot": "8 3 3 3 3 3"}
DASHES |= {"sparse": "4 8", "longdashdot": "14 3 3 3", "dot": "3 3"}
"""Line style -> its SVG dash array. Line styles distinguish runs beside their colours; dots are of held-out records, so
that runs get them last."""

_HELD_OUT_DASHES = ("dot", "dashdot", "longdash", "dash", "solid")
"""Line styles of the sets of held-out records of a run, in their order."""

POINTS = 1000
"""Maximum number of points of a line; longer lines are thinned."""

_ANSWER = "answer_"
_SHARES = (_ANSWER, "retrieval")

_CAPITALS = {"ema": "EMA", "jepa": "JEPA", "lm": "LM", "stp": "STP"}
"""Words of the names of columns that titles write in capitals."""


class Style(NamedTuple):
    """How the lines of a run are drawn, and the arm it belongs to."""

    colour: str
    dash: str
    arm: str = ""  # empty for a run outside of arms


Look = Mapping[str, Style]
"""Name of a run -> its style."""


def looks(runs: Sequence[LoggedRun], comparison: ComparedArms | None) -> Look:
    """Assign a colour to each arm and a line style to each seed; runs outside of arms get separate colours.

    A seed has one style in all arms, also in one that lacks other seeds.
    """
    arms = comparison.arms if comparison else ()
    seeds = list(dict.fromkeys(run.seed for arm in arms for run in arm.runs))
    places = {run.folder: (place, seeds.index(run.seed)) for place, arm in enumerate(arms) for run in arm.runs}
    assigned: dict[str, Style] = {}
    for run in runs:
        colour, seed = places.get(run.folder, (len(arms) + len(assigned), 0))
        # Where colours repeat, line styles differ: those behind the ones of the seeds.
        dash = list(DASHES)[(seed + colour // len(PALETTE) * max(len(seeds), 1)) % len(DASHES)]
        arm = arms[colour].name if run.folder in places else ""
        assigned[run.name] = Style(PALETTE[colour % len(PALETTE)], dash, arm)
    return assigned


def run_legend(runs: Sequence[LoggedRun], look: Look) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return each arm and its runs, with their colours and SVG dash arrays; runs outside of arms come last."""
    arms: dict[str, list[tuple[str, str, str]]] = {}
    for run in runs:
        colour, dash, arm = look[run.name]
        arms.setdefault(arm, []).append((run.name, colour, DASHES[dash]))
    return sorted(arms.items(), key=lambda item: item[0] == "")


def curves(runs: Sequence[LoggedRun], columns: Sequence[str], look: Look) -> list[tuple[str, Markup]]:
    """Return titles and charts of columns of ``metrics.jsonl`` over steps, which ``templates/charts.js`` draws.

    Args:
        runs: those that are drawn.
        columns: names of columns; one that no run has is left out.
        look: name of a run -> its colour and line style.
    """
    charts = []
    all_lines = {column: [line for run in runs for line in _lines(run, column, columns, look)] for column in columns}
    for place, (column, lines) in enumerate((column, lines) for column, lines in all_lines.items() if lines):
        title = terminal.visible_lines(_title(column))
        is_share = column.startswith(_SHARES)
        data = {"percent": is_share, "lines": lines}
        element = (
            '<div class="chart" id="{}" role="img" aria-label="{} over steps. Last values: {}" data-title="{}"></div>{}'
        )
        name = f"steps-{place}"
        charts.append(
            (
                title,
                Markup(element).format(
                    name,
                    title,
                    _last_values(lines, ".1%" if is_share else ".4g"),
                    title,
                    json_block(f"{name}-data", data),
                ),
            )
        )
    return charts


def _title(column: str) -> str:
    """Return the title of a column's chart: ``LM loss`` for ``lm_loss``, ``answers: exact match`` for a score."""
    if column.startswith(_ANSWER):
        return f"answers: {score_words(column.removeprefix(_ANSWER))}"
    return " ".join(_CAPITALS.get(word, word) for word in column.split("_"))


def _lines(run: LoggedRun, column: str, columns: Sequence[str], look: Look) -> list[JsonObject]:
    """Return the line of a column, and one of each set of held-out records that has it.

    ``run`` is the name by which the checkboxes of the legend hide a run in all charts.
    """
    visible_name, (colour, dash, _) = terminal.visible_lines(run.name), look[run.name]
    curves = [(column, visible_name, dash)]
    # Without a line of training, such as for scores of answers, the first set has the style of its run.
    styles = _HELD_OUT_DASHES if _points(run, column)[0] else dict.fromkeys([dash, *_HELD_OUT_DASHES])
    for (name, of_set), style in zip(_held_out(run, column, columns).items(), cycle(styles), strict=False):
        curves.append((name, f"{visible_name}, held-out {terminal.visible_lines(of_set)}".rstrip(), style))
    lines: list[JsonObject] = []
    for name, label, style in curves:
        steps, values = _points(run, name)
        if steps:
            line: JsonObject = {"run": visible_name, "name": label, "heldOut": name != column}
            lines.append(line | {"colour": colour, "dash": DASHES[style], "x": steps, "y": values})
    return lines


def _last_values(lines: Sequence[JsonObject], spec: str) -> str:
    """Describe the end of each line, for readers who do not see the chart; ``spec`` is the format of a value."""
    return "; ".join(f"{line['name']} {line['y'][-1]:{spec}} at step {line['x'][-1]:,.0f}" for line in lines)


def _held_out(run: LoggedRun, metric: str, metrics: Sequence[str]) -> dict[str, str]:
    """Return the columns of a run that hold a metric of held-out records, and the name of the set of each."""
    names = dict.fromkeys(name for line in run.metrics for name in line if name.startswith(HELD_OUT))
    split = {name: set_and_metric(name, metrics) for name in names}
    return {name: of_set for name, (of_set, of_metric) in split.items() if of_metric == metric}


def _points(run: LoggedRun, name: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of a curve; a long one is thinned to every n-th point and the last."""
    points = [(line["step"], line[name]) for line in run.metrics if is_number(line.get(name))]
    stride = -(-len(points) // POINTS) or 1
    thinned = [*points[:-1:stride], *points[-1:]]
    return [step for step, _ in thinned], [float(f"{value:.6g}") for _, value in thinned]
