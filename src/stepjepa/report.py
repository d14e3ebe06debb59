"""One table from run folders and the evaluations that lie in them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.run_folder import read_run

COLUMNS = (
    "run",
    "mode",
    "K",
    "accuracy",
    "prefix match",
    "stop rate",
    "LM loss",
    "matched",
    "shuffled",
    "tokens",
    "seconds",
)


def run_row(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a run and its evaluation came to.

    Args:
        folder: a run folder in which ``stepjepa evaluate`` has left a summary.

    Returns:
        A value for each of ``COLUMNS``; None where it was not measured. Shares are between 0 and 1, tokens those of
        the whole training, seconds those of training.

    Raises:
        UserError: no run folder, an unfinished run, no evaluation, or several.
    """
    path = Path(folder)
    run = read_run(path)
    if run["status"] != "finished":
        raise UserError("the run is not finished; go on with --resume_from_checkpoint last", path=path)
    summaries = sorted(path.glob("*.summary.json"))
    if len(summaries) != 1:
        raise UserError(
            f"holds {len(summaries)} evaluations (*.summary.json), expected one; run 'stepjepa evaluate' with an "
            "--output_file in the run folder",
            path=path,
        )
    summary: dict[str, Any] = json.loads(summaries[0].read_text(encoding="utf-8"))
    scores, similarity = summary["scores"], summary.get("similarity") or {}
    return {
        "run": path.name,
        "mode": run["jepa"]["mode"],
        "K": run["jepa"]["predictors"],
        "accuracy": scores[summary["headline"]]["mean"],
        "prefix match": scores[summary["lenient"]]["mean"],
        "stop rate": scores["stopped"]["mean"],
        "LM loss": summary["gold_loss"],
        "matched": similarity.get("matched_similarity"),
        "shuffled": similarity.get("shuffled_similarity"),
        "tokens": run["results"]["tokens"],
        "seconds": run["results"]["train_seconds"],
    }


def report(folders: Sequence[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """One row for each run folder, in the order given.

    Raises:
        UserError: see :func:`run_row`; or the runs were evaluated on different files.
    """
    rows, tests = [], set()
    for folder in folders:
        rows.append(run_row(folder))
        summary = json.loads(next(Path(folder).glob("*.summary.json")).read_text(encoding="utf-8"))
        tests.add((summary["test_fingerprint"], summary["n"]))
    if len(tests) > 1:
        raise UserError("the runs were evaluated on different test files, so their numbers can't stand in one table")
    return rows


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name in ("accuracy", "prefix match", "stop rate"):
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
