"""One table from run folders and the evaluations that lie in them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from stepjepa.errors import UserError
from stepjepa.experiments.evaluated_run import EvaluatedRun, read_evaluated_run

COLUMNS = (
    "run",
    "mode",
    "K",
    "score",
    "accuracy",
    "lenient",
    "stop rate",
    "LM loss",
    "matched",
    "shuffled",
    "tokens",
    "seconds",
)

# Settings of an evaluation without which equal models answer differently.
_GENERATION = ("max_new_tokens", "temperature", "top_p", "top_k", "num_samples")


def run_row(run: EvaluatedRun) -> dict[str, Any]:
    """What a run and its evaluation came to.

    Args:
        run: from ``read_evaluated_run``.

    Returns:
        A value for each of ``COLUMNS``; None where it was not measured. ``score`` names the headline and, in brackets,
        the lenient score, whose means follow. Shares are between 0 and 1, tokens those of
        the whole training, seconds those of training.
    """
    return {
        "run": run.folder.name,
        "mode": run.settings["mode"],
        # Regular runs have no views, and so none.
        "K": run.settings.get("predictors", 0),
        "score": f"{run.protocol['headline']} ({run.protocol['lenient']})",
        "accuracy": run.mean("headline"),
        "lenient": run.mean("lenient"),
        # Nobody knows whether another program's model stopped by itself.
        "stop rate": run.mean("stopped"),
        "LM loss": run.figures["gold_loss"],
        "matched": run.figures["matched"],
        "shuffled": run.figures["shuffled"],
        "tokens": run.figures["tokens"],
        "seconds": run.figures["seconds"],
    }


def report(folders: Sequence[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """One row for each run folder, in the order given.

    Raises:
        UserError: see ``read_evaluated_run``; or the runs were evaluated on different files or in different ways.
    """
    runs = [read_evaluated_run(folder) for folder in folders]
    if len({(run.protocol["test file (sha256)"], tuple(run.indices)) for run in runs}) > 1:
        raise UserError("the runs were evaluated on different test files, so their numbers can't stand in one table")
    if len({tuple(run.protocol[name] for name in ("task", "headline", "lenient")) for run in runs}) > 1:
        raise UserError("the runs were scored by different tasks, so their numbers can't stand in one table")
    for name in _GENERATION:
        # Of another program's answers nobody knows.
        values = {json.dumps(run.protocol.get(name)): run.folder for run in reversed(runs)}
        values.pop("null", None)
        if len(values) > 1:
            told = " and ".join(f"{value} ({folder})" for value, folder in sorted(values.items()))
            raise UserError(
                f"the runs were evaluated with --{name} {told}, so their numbers can't stand in one table; evaluate "
                "one again, or leave it out"
            )
    return [run_row(run) for run in runs]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name in ("accuracy", "lenient", "stop rate"):
        return f"{value:.1%}"
    if name in ("tokens", "seconds"):
        return f"{value:,.0f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table that also reads well in a terminal."""
    cells = [list(COLUMNS), *([_cell(name, row[name]) for name in COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
