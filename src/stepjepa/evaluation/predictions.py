"""Score a file of answers that another program generated."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.evaluation.judging import Answer, Question, judge, select_records
from stepjepa.evaluation.output import meta_file, summary_file
from stepjepa.evaluation.settings import ScoreSettings
from stepjepa.files import fingerprint, read_jsonl, write_json, write_jsonl

NO_PREDICTION = "no prediction"

# Records scored between two updates of the progress bar; a task may score them in parallel.
_CHUNK = 128


def score_predictions(settings: ScoreSettings) -> dict[str, Any]:
    """Score a file of answers, write lines and summary as ``stepjepa evaluate`` does, and return the summary.

    Raises:
        UserError: a file is wrong, or the predictions don't fit the test file.
    """
    records = read_records(settings.test_file)
    selection = select_records(settings, records)
    found = _read_answers(settings, len(records), selection.records)
    nothing = [Answer("")] * max(map(len, found.values()), default=1)
    questions = [Question(index, record) for index, record in selection.records.items()]
    lines: list[dict[str, Any]] = []
    try:
        for start in tqdm(range(0, len(questions), _CHUNK), desc=f"score, {_CHUNK} at a time", disable=None):
            chunk = questions[start : start + _CHUNK]
            answers = [found.get(question.index, nothing) for question in chunk]
            lines += judge(selection.task, chunk, answers, selection.headline)
    finally:
        selection.task.close()
    lines = [line if line["index"] in found else _without_prediction(line) for line in lines]
    summary = {
        "predictions": str(settings.predictions),
        "test_file": str(settings.test_file),
        "test_fingerprint": fingerprint(settings.test_file),
        **selection.summarise(lines),
        "settings": {
            "task_options": selection.options(settings.task_options),
            "scoring": settings.scoring,
            "missing": settings.missing,
        },
    }
    # Files of an earlier evaluation belong to the lines that are replaced.
    for file in (summary_file(settings.output_file), meta_file(settings.output_file)):
        file.unlink(missing_ok=True)
    write_jsonl(settings.output_file, lines)
    write_json(summary_file(settings.output_file), summary)
    return summary


def _without_prediction(line: dict[str, Any]) -> dict[str, Any]:
    """Set all scores of a line to wrong: by some rules, such as the published ones, an empty answer would be right."""
    wrong = {"scores": dict.fromkeys(line["scores"], False), "error": NO_PREDICTION}
    if "samples" in line:
        scores = dict.fromkeys(line["samples"][0]["scores"], False)
        wrong["samples"] = [sample | {"scores": scores, "error": NO_PREDICTION} for sample in line["samples"]]
    return line | wrong


def _read_answers(settings: ScoreSettings, size: int, wanted: Collection[int]) -> dict[int, list[Answer]]:
    """Read the answers by position in the test file.

    Args:
        settings: the file of predictions and what a missing prediction is.
        size: number of records in the test file.
        wanted: positions of the records that are scored.

    Raises:
        UserError: a line is wrong, or, with ``missing="error"``, a wanted prediction is missing.
    """
    path = Path(settings.predictions)
    found: dict[int, list[Answer]] = {}
    for number, line in read_jsonl(path, "file of predictions"):
        index = line.get("index")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
            raise UserError(
                f"'index' is {index!r}, expected a whole number from 0 to {size - 1}, the position in the test file",
                path=path,
                line=number,
            )
        if index in found:
            raise UserError(f"a second prediction for index {index}; remove one", path=path, line=number)
        found[index] = _read_samples(line, path, number)
    counts = {len(samples) for samples in found.values()}
    if len(counts) > 1:
        raise UserError(f"{min(counts)} to {max(counts)} samples per record; give every record as many", path=path)
    missing = [index for index in wanted if index not in found]
    if missing and settings.missing == "error":
        raise UserError(
            f"no prediction for {len(missing)} of {len(wanted)} records (the first is index {missing[0]}); add them, "
            "or pass --missing wrong to count them as wrong",
            path=path,
        )
    return found


def _read_samples(line: dict[str, Any], path: Path, number: int) -> list[Answer]:
    """The answers of a line, which ``stepjepa evaluate`` may have written."""
    samples = line.get("samples")
    given = samples or line.get("generated")
    answers = []
    for part in given if isinstance(given, list) else [given]:
        if isinstance(part, dict):
            text, stopped = part.get("generated"), part.get("stopped")
        else:
            text, stopped = part, None if samples else line.get("stopped")
        if not isinstance(text, str):
            raise UserError("'generated' must be a string, or a list of them", path=path, line=number)
        if not (stopped is None or isinstance(stopped, bool)):
            raise UserError(f"'stopped' is {stopped!r}, expected true, false or nothing", path=path, line=number)
        answers.append(Answer(text, stopped))
    if not answers:
        raise UserError("'generated' is an empty list; give at least one answer", path=path, line=number)
    return answers
