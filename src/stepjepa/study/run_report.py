"""The report on single runs: one row for each run folder, and the rows as text."""

import os
from collections.abc import Sequence

from stepjepa.base.columns import aligned_columns, numbered_names, wrapped
from stepjepa.base.json_object import JsonObject
from stepjepa.evaluation.output import mean_with_interval
from stepjepa.evaluation.summary_text import score_words
from stepjepa.study.comparable import check_comparable
from stepjepa.study.evaluated_run import HITS_AT_1, read_evaluated_run
from stepjepa.study.run_folders import run_names
from stepjepa.study.table import (
    FIGURE_FORMATS,
    FIGURE_HEADS,
    formatted,
    interval,
)

# Keys of the protocol in which the runs of one table must be equal.
_SAME_QUESTIONS = (
    *("test file (sha256)", "task", "headline", "lenient"),
    *("max_new_tokens", "temperature", "top_p", "top_k", "num_samples"),
)


def report(
    folders: Sequence[str | os.PathLike[str]], names: Sequence[str] = (), evaluation: str | None = None
) -> list[JsonObject]:
    """Return one row per run folder: column head -> value, with the 95 % interval of the accuracy over examples.

    ``accuracy`` is the mean of the score that ``score`` names first, ``lenient`` of the one in its brackets.

    Args:
        folders: the run folders.
        names: name of each row; empty for the names of the folders.
        evaluation: the evaluation to read, if a run has several.

    Raises:
        UserError: a run has no evaluation, or they were evaluated on different files or in different ways.
    """
    runs = [read_evaluated_run(folder, evaluation) for folder in folders]
    check_comparable(runs, _SAME_QUESTIONS)
    rows = []
    for run, name in zip(runs, names or run_names([run.folder for run in runs]), strict=True):
        answers = mean_with_interval(run.examples["headline"] or [])
        row = {
            "run": name,
            "mode": run.settings["mode"],
            # Regular runs have no views.
            "K": run.settings.get("predictors", 0),
            "score": f"{run.protocol['headline']} ({run.protocol['lenient']})",
            "accuracy": run.mean("headline"),
            "lenient": run.mean("lenient"),
            "stop rate": run.mean("stopped"),
            "nearest right": run.mean(HITS_AT_1),
        }
        figures = {head: run.figures[figure] for head, figure in FIGURE_HEADS.items() if head != "FLOPs"}
        rows.append({**row, **figures, "low": answers["low"], "high": answers["high"]})
    return rows


def report_text(rows: Sequence[JsonObject]) -> str:
    """Format rows of :func:`report` for a terminal: a sentence on the best run, and tables of 80 columns."""
    best = max(row["accuracy"] for row in rows)
    leading = [row for row in rows if row["accuracy"] == best]
    leader = leading[0]["run"] if len(leading) == 1 else f"{len(leading)} of {len(rows)} runs"
    # Means over samples have none.
    ends = interval(leading[0]["low"], leading[0]["high"])
    ends += " (95 % interval over examples)" if ends else ""
    headline, _, lenient = rows[0]["score"].rstrip(")").partition(" (")
    sentence = f"best by {score_words(headline)}: {leader} with {best:.1%}{ends}"
    sentence += f"; lenient: {score_words(lenient)}" if lenient and lenient != headline else ""
    if len(rows) > 1:
        sentence += "; whether arms differ over seeds, 'stepjepa compare' tests"
    names, legend = numbered_names([row["run"] for row in rows])
    forms = {"lenient": "{:.1%}", "stop rate": "{:.1%}", **FIGURE_FORMATS}
    del forms["FLOPs"]
    if any(row["nearest right"] is not None for row in rows):
        # Asked for by `retrieval`: how often the right answer is the nearest by embeddings.
        forms = {"nearest right": "{:.1%}", **forms}
    cells = [
        (
            *(names[row["run"]], row["mode"], str(row["K"])),
            f"{'* ' if leading == [row] else ''}{row['accuracy']:.1%}{interval(row['low'], row['high'])}",
            *(formatted(row[name], pattern) for name, pattern in forms.items()),
        )
        for row in rows
    ]
    return f"{wrapped(sentence)}\n\n{legend}{aligned_columns(('run', 'mode', 'K', 'accuracy', *forms), cells)}"
