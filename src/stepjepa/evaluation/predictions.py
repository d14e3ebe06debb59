"""Score the answers of another program as those of a model are scored."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tqdm import tqdm

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.files import claimed_output, fingerprint, read_jsonl, write_json, write_jsonl
from stepjepa.base.json_object import JsonObject
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.reading_notes import tell_unused
from stepjepa.data.sources import read_records
from stepjepa.evaluation.judging import Question, judge
from stepjepa.evaluation.output import check_summary, meta_file, summary_file
from stepjepa.evaluation.selection import Selection
from stepjepa.evaluation.settings import ScoreSettings
from stepjepa.models.sampling import Answer
from stepjepa.tasks.registry import is_custom

_CHUNK = 128  # records scored between two updates of the progress bar; a task may score them in parallel


def score_predictions(settings: ScoreSettings) -> JsonObject:
    """Score a file of answers, write lines and summary as ``stepjepa evaluate`` does, and return the summary."""
    with claimed_output(settings.output_file, settings.overwrite):
        if not settings.overwrite:
            check_summary(settings.output_file)
        return _score_predictions(settings)


def _score_predictions(settings: ScoreSettings) -> JsonObject:
    records = read_records(settings.test_file, bad=BadRecords())
    selection = Selection(records, **settings.selection)
    tell_unused(selection.records.values(), extra=not is_custom(selection.task))
    answers, prompts = _read_answers(settings, len(records), selection.records)
    questions = [Question(index, record, prompts[index]) for index, record in selection.records.items()]
    lines: list[JsonObject] = []
    try:
        for start in tqdm(range(0, len(questions), _CHUNK), desc=f"score, {_CHUNK} at a time", disable=None):
            chunk = questions[start : start + _CHUNK]
            lines += judge(selection.task, chunk, [answers[question.index] for question in chunk], selection.headline)
    finally:
        selection.task.close()
    summary = {
        "predictions": str(settings.predictions),
        "test_file": str(settings.test_file),
        "test_fingerprint": fingerprint(settings.test_file),
        **selection.summarise(lines),
        "settings": {"task_options": selection.options, "scoring": settings.scoring},
    }
    # Files of an earlier evaluation belong to the lines that are replaced.
    for file in (summary_file(settings.output_file), meta_file(settings.output_file)):
        file.unlink(missing_ok=True)
    write_jsonl(settings.output_file, lines)
    write_json(summary_file(settings.output_file), summary)
    return summary


def _read_answers(
    settings: ScoreSettings, size: int, wanted: Collection[int]
) -> tuple[dict[int, list[Answer]], dict[int, str | None]]:
    """Read the answers, and their prompts as text, by position in a test file of ``size`` records.

    A prompt is None if its line has none. UserError if an answer is wrong or missing.
    """
    path = Path(settings.predictions)
    answers, prompts = dict[int, list[Answer]](), dict[int, str | None]()
    for number, line in read_jsonl(path, "file of predictions"):
        index = line.get("index")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size or index in answers:
            fault = (
                f"'index' is {index!r}, expected a whole number from 0 to {size - 1} (the position in the test file)"
            )
            raise UserError(f"{fault} that no other line has", path=path, line=number)
        try:
            answers[index] = _read_samples(line)
        except ValueError as error:
            raise UserError(str(error), path=path, line=number) from None
        # It decides whether an answer begins inside a thought.
        prompts[index] = prompt if isinstance(prompt := line.get("prompt"), str) else None
    counts = {len(samples): index for index, samples in answers.items()}
    if len(counts) > 1:
        fewest_and_most = (min(counts), max(counts))
        samples = ", ".join(f"{counted(count, 'sample')} at index {counts[count]}" for count in fewest_and_most)
        raise UserError(f"{samples}; give every record as many", path=path)
    missing = [index for index in wanted if index not in answers]
    if missing:
        fault = f"no prediction for {len(missing)} of {len(wanted)} records (the first is index {missing[0]})"
        raise UserError(f"{fault}; add them", path=path)
    return answers, prompts


def _read_samples(line: JsonObject) -> list[Answer]:
    """Return the answers of a line, which ``stepjepa evaluate`` may have written; ValueError if one is wrong."""
    content = line.get("samples") or line.get("generated")
    if content is None:
        raise ValueError(f"no 'generated', the answer as text or a list of samples; the line has {', '.join(line)}")
    parts = content if isinstance(content, list) else [content]
    if not parts:
        raise ValueError("'generated' is an empty list, expected a text or a list of at least one")
    answers: list[Answer] = []
    for part in parts:
        about = part if isinstance(part, dict) else line | {"generated": part}
        text, stopped = about.get("generated"), about.get("stopped")
        if not isinstance(text, str):
            raise ValueError(f"'generated' has {text!r:.50}, expected a text or a list of at least one")
        if not isinstance(stopped, bool | None):
            raise ValueError(
                f"'stopped' is {stopped!r:.50}, expected true or false; leave it out where it is not known"
            )
        answers.append(Answer(text, stopped))
    return answers
