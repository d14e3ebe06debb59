"""One table of run folders and the evaluations that lie in them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from stepjepa.errors import UserError
from stepjepa.evaluation.output import mean_with_interval
from stepjepa.experiments.evaluated_run import EvaluatedRun, read_evaluated_run
from stepjepa.experiments.text_table import UNKNOWN, as_lines, legend, short_names, wrap

COLUMNS = (
    *("run", "mode", "K", "score", "accuracy", "lenient"),
    *("stop rate", "LM loss", "matched", "shuffled", "tokens", "seconds"),
)

# Settings of an evaluation without which equal models answer differently.
_GENERATION = ("max_new_tokens", "temperature", "top_p", "top_k", "num_samples")


def run_row(run: EvaluatedRun) -> dict[str, Any]:
    """The results of a run and its evaluation.

    Returns:
        A value for each of ``COLUMNS``, None where it was not measured, and ``low`` and ``high``, the 95 % interval of
        the accuracy over examples. ``score`` names the headline and, in brackets, the lenient score, whose means
        follow. Shares are between 0 and 1; tokens and seconds are those of the whole training.
    """
    answers = mean_with_interval(run.examples["headline"] or [])
    return {
        "run": run.folder.name,
        "mode": run.settings["mode"],
        # Regular runs have no views, and so none.
        "K": run.settings.get("predictors", 0),
        "score": f"{run.protocol['headline']} ({run.protocol['lenient']})",
        "accuracy": run.mean("headline"),
        "lenient": run.mean("lenient"),
        "stop rate": run.mean("stopped"),
        "LM loss": run.figures["gold_loss"],
        **{name: run.figures[name] for name in ("matched", "shuffled", "tokens", "seconds")},
        "low": answers["low"],
        "high": answers["high"],
    }


def report(folders: Sequence[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """One row for each run folder, in the order given; see :func:`run_row`.

    Raises:
        UserError: see ``read_evaluated_run``; or the runs were evaluated on different files or in different ways.
    """
    runs = [read_evaluated_run(folder) for folder in folders]
    if len({(run.protocol["test file (sha256)"], tuple(run.indices)) for run in runs}) > 1:
        raise UserError("the runs were evaluated on different test files, so their numbers can't stand in one table")
    if len({tuple(run.protocol[name] for name in ("task", "headline", "lenient")) for run in runs}) > 1:
        raise UserError("the runs were scored by different tasks, so their numbers can't stand in one table")
    for name in _GENERATION:
        # Of another program's answers this is not known.
        values = {json.dumps(run.protocol.get(name)): run.folder for run in reversed(runs)}
        values.pop("null", None)
        if len(values) > 1:
            found = " and ".join(f"{value} ({folder})" for value, folder in sorted(values.items()))
            raise UserError(
                f"the runs were evaluated with --{name} {found}, so their numbers can't stand in one table; evaluate "
                "one again, or leave it out"
            )
    return [run_row(run) for run in runs]


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """For a terminal: which run is best, in one sentence, and the rows in tables of 80 columns."""
    names = short_names([row["run"] for row in rows])
    best = max(row["accuracy"] for row in rows)
    leading = [row for row in rows if row["accuracy"] == best]
    who = leading[0]["run"] if len(leading) == 1 else f"{len(leading)} of {len(rows)} runs"
    interval = "" if leading[0]["low"] is None else f", 95 % interval over examples {_interval(leading[0])}"
    sentence = f"best by {rows[0]['score']}: {who} with {best:.1%}{interval}; *: best"
    if len(rows) > 1:
        sentence += "; whether arms differ over seeds, 'stepjepa compare' tests"
    shown = [name for name in COLUMNS if name != "score"]
    cells = [[_cell(name, row, names, best) for name in shown] for row in rows]
    return "\n\n".join(filter(None, [wrap(sentence), legend(names), as_lines(shown, cells)]))


def _interval(row: dict[str, Any]) -> str:
    return f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def _cell(name: str, row: dict[str, Any], names: dict[str, str], best: float) -> str:
    value = row[name]
    if value is None:
        return UNKNOWN
    if name == "run":
        return names[value]
    if name == "accuracy":
        interval = "" if row["low"] is None else f" {_interval(row)}"
        return f"{'* ' if value == best else ''}{value:.1%}{interval}"
    if name in ("lenient", "stop rate"):
        return f"{value:.1%}"
    if name in ("tokens", "seconds"):
        return f"{value:,.0f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
