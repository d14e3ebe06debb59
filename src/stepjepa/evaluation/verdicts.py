"""Have a task score responses, and check its verdicts: a user's own task may return anything."""

import json
import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.tasks.base import Response, Scored, Task, record_error

_HELP = "see docs/tasks.md"


def score_checked(task: Task, records: Sequence[Record], responses: Sequence[Response], headline: str) -> list[Scored]:
    """Score responses; numbers of NumPy and tensors of one number become Python's.

    Args:
        task: scores them.
        records: that of each response.
        responses: the answers.
        headline: the score that decides what is an error.

    Raises:
        UserError: a verdict would end the evaluation later, or make a mean that is no number; the task lacks a score.
    """
    given = _verdicts(task, records, responses)
    verdicts = []
    for record, scored in zip(records, given, strict=True):
        if not isinstance(scored, Scored):
            expected = "expected stepjepa.tasks.base.Scored(scores, ...)"
            raise UserError(f"task '{task.name}': score gave {shown(scored)}, {expected}; {_HELP}")
        scores = {name: _plain(value) for name, value in scored.scores.items()}
        extracted = {name: _plain(value) for name, value in scored.extracted.items()}
        _check_names(task, scores, headline)
        if fault := _fault(task, scores, extracted):
            raise record_error(record, f"task '{task.name}': {fault}; {_HELP}")
        verdicts.append(replace(scored, scores=scores, extracted=extracted))
    return verdicts


def _verdicts(task: Task, records: Sequence[Record], responses: Sequence[Response]) -> Sequence[object]:
    """Have a task score responses; an error of its code becomes one that names the record and the line of the code."""
    try:
        return task.score_all(records, responses)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        logging.getLogger(__name__).debug("score failed", exc_info=error)
        at_fault = records[0]
        for record, response in zip(records, responses, strict=True):
            try:
                task.score(record, response)
            except Exception:  # as above
                at_fault = record
                break
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        fault = f"task '{task.name}': score failed in {where} ({type(error).__name__}: {error}); correct it"
        raise record_error(at_fault, fault) from None


def details_checked(task: Task, lines: Sequence[JsonObject]) -> JsonObject:
    """Return the details of a task as plain JSON: numbers of NumPy become Python's, those that are not finite None.

    Raises:
        UserError: they can't be written as JSON.
    """
    details = task.details(lines)
    try:
        checked: JsonObject = json.loads(json.dumps(details, default=_plain), parse_constant=lambda _: None)
    except (TypeError, ValueError):
        fault = f"details gave {shown(details)}, expected what JSON can hold"
        raise UserError(f"task '{task.name}': {fault}; {_HELP}") from None
    return checked


def _plain(value: Any) -> Any:
    """Return a number of NumPy, or a tensor of one number, as Python's; any other value unchanged."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # an array of several
        return value


def _check_names(task: Task, scores: Mapping[str, object], headline: str) -> None:
    """Raise ``UserError`` for a verdict without the headline, or without the secondary score, which tables show."""
    there = f"only {', '.join(scores)}"
    if headline not in scores:
        hint = "; leave `startswith` out" if headline == task.beginning != task.headline else ""
        raise UserError(f"task '{task.name}' has no score '{headline}', {there}{hint}")
    if task.secondary_score not in scores:
        fault = f"task '{task.name}' has no score '{task.secondary_score}', its secondary_score, {there}"
        raise UserError(f"{fault}; name one of them")


def _fault(task: Task, scores: Mapping[str, object], extracted: Mapping[str, object]) -> str | None:
    """Return what is wrong with a verdict; None if nothing is. Its scores must be those of the task's first verdict."""
    for name, value in scores.items():
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            return f"score '{name}' is {shown(value)}, expected true, false or a finite number"
    task.names_of_first_verdict = task.names_of_first_verdict or tuple(scores)
    if {*scores} != {*task.names_of_first_verdict}:
        expected = f"expected {', '.join(task.names_of_first_verdict)} as for an earlier record"
        return f"the scores are {', '.join(scores)}, {expected}"
    try:
        json.dumps(extracted)
    except (TypeError, ValueError):
        return f"extracted is {shown(extracted)}, expected texts or None"
    return None
