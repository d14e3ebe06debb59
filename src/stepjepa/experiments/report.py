"""One table from run folders and the evaluations that lie in them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.run_folder import read_run

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


def run_row(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a run and its evaluation came to.

    Args:
        folder: a run folder in which ``stepjepa evaluate`` has left a summary.

    Returns:
        A value for each of ``COLUMNS``; None where it was not measured. ``score`` names the headline and, in brackets,
        the lenient score, whose means follow. Shares are between 0 and 1, tokens those of
        the whole training, seconds those of training.

    Raises:
        UserError: no run folder, an unfinished run, no evaluation, or several, or one of another model.
    """
    return _row(Path(folder), *_read(Path(folder)))


def _row(path: Path, run: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    scores, similarity = summary["scores"], summary.get("similarity") or {}
    return {
        "run": path.name,
        "mode": run["jepa"]["mode"],
        "K": run["jepa"]["predictors"],
        "score": f"{summary['headline']} ({summary['lenient']})",
        "accuracy": scores[summary["headline"]]["mean"],
        "lenient": scores[summary["lenient"]]["mean"],
        # Nobody knows whether another program's model stopped by itself.
        "stop rate": scores["stopped"]["mean"] if "stopped" in scores else None,
        "LM loss": summary["gold_loss"],
        "matched": similarity.get("matched_similarity"),
        "shuffled": similarity.get("shuffled_similarity"),
        "tokens": run["results"]["tokens"],
        "seconds": run["results"]["train_seconds"],
    }


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run folder says of its run and of the one evaluation in it."""
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
    try:
        summary: dict[str, Any] = json.loads(summaries[0].read_text(encoding="utf-8"))
    except ValueError:
        raise UserError("is no summary of an evaluation; remove it and evaluate again", path=summaries[0]) from None
    evaluated = summary.get("settings", {}).get("model")
    # Trained on since then, say. Answers of another program name no model, and weights may have been thrown away.
    if evaluated is not None and any(path.glob("*.safetensors")) and evaluated != model_fingerprint(path):
        raise UserError(
            "is the evaluation of another model than the folder holds now; evaluate again with --overwrite",
            path=summaries[0],
        )
    return run, summary


def report(folders: Sequence[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """One row for each run folder, in the order given.

    Raises:
        UserError: see :func:`run_row`; or the runs were evaluated on different files or in different ways.
    """
    paths = [Path(folder) for folder in folders]
    found = [_read(path) for path in paths]
    rows, summaries = [_row(path, *each) for path, each in zip(paths, found, strict=True)], [each[1] for each in found]
    if len({(summary["test_fingerprint"], summary["n"]) for summary in summaries}) > 1:
        raise UserError("the runs were evaluated on different test files, so their numbers can't stand in one table")
    if len({(summary["task"], row["score"]) for summary, row in zip(summaries, rows, strict=True)}) > 1:
        raise UserError("the runs were scored by different tasks, so their numbers can't stand in one table")
    for name in _GENERATION:
        # Of another program's answers nobody knows.
        values = {summary.get("settings", {}).get(name) for summary in summaries} - {None}
        if len(values) > 1:
            raise UserError(
                f"the runs were evaluated with --{name} {' and '.join(sorted(map(str, values)))}, so their numbers "
                "can't stand in one table"
            )
    return rows


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
