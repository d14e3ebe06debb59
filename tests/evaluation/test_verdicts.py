"""Verdicts of a user's own task that would spoil means or end an evaluation at its last line."""

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from stepjepa.base.errors import UserError
from stepjepa.evaluation.judging import Question, judge
from stepjepa.evaluation.output import summarise
from stepjepa.evaluation.verdicts import details_checked
from stepjepa.models.sampling import Answer
from stepjepa.tasks.base import Scored, Task
from task_records import record


class Given(Task):
    """Gives the verdicts that it was made with, one after the other."""

    name = "given"
    headline = "right"
    secondary_score = "near"

    def __init__(self, *verdicts: Scored) -> None:
        self.verdicts = iter(verdicts)

    def truth(self, record):
        return record.answer

    def score(self, record, response):
        return next(self.verdicts)


def judged(*verdicts: Scored) -> list[dict[str, Any]]:
    """The lines of two batches, of the first verdict and of the others."""
    questions = [Question(index, record("one", "1", line=index + 5)) for index in range(len(verdicts))]
    answers, task = [[Answer("1", True, 3)]] * len(verdicts), Given(*verdicts)
    return judge(task, questions[:1], answers[:1]) + judge(task, questions[1:], answers[1:])


def scored(right: Any, **extracted: Any) -> Scored:
    return Scored({"right": right, "near": 1.0}, extracted)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "yes", np.float32("nan"), np.ones(3), Fraction(1, 3)])
def test_a_score_that_is_no_number_is_refused_with_its_record(value):
    words = r":6: task 'given': score 'right' is '.*', expected true, false or a finite number; see docs/tasks.md$"
    with pytest.raises(UserError, match=words):
        judged(scored(True), scored(value))


@pytest.mark.parametrize(
    ("value", "python"), [(np.bool_(True), True), (np.float32(0.5), 0.5), (np.int64(1), 1), (torch.tensor(0.25), 0.25)]
)
def test_numbers_of_other_libraries_become_pythons(value, python):
    lines = json.loads(json.dumps(judged(scored(value, length=np.int64(7)))))
    assert lines[0]["scores"] == {"right": python, "near": 1.0}
    assert type(lines[0]["scores"]["right"]) is type(python)
    assert lines[0]["extracted"] == {"length": 7}
    assert summarise([line | {"stopped": None} for line in lines], "right")["scores"]["right"]["mean"] == python


@pytest.mark.parametrize("more", [{}, {"right": True, "near": 1.0, "long": 0.0}])
def test_every_record_has_the_scores_of_the_first(more):
    second = Scored({"right": True, "near": 1.0, **more})
    first = Scored({"right": True, "near": 1.0, **({} if more else {"long": 0.0})})
    with pytest.raises(UserError, match=r":6: task 'given': the scores are .*, expected .* as for an earlier record"):
        judged(first, second)


def test_what_can_not_be_written_is_refused_with_its_record():
    with pytest.raises(UserError, match=r":5: task 'given': extracted is '\{.*\}', expected texts or None"):
        judged(scored(True, parts={1, 2}))


def test_the_score_that_tables_show_beside_the_headline_must_be_there():
    words = "task 'given' has no score 'near', its secondary_score, only right; name one of them$"
    with pytest.raises(UserError, match=words):
        judged(Scored({"right": True}))


def test_details_become_plain_json_at_the_end_of_an_evaluation(monkeypatch):
    details: dict[str, Any] = {"count": np.int64(3), "mean": np.float32(0.5), "by length": [np.float64("nan")]}
    monkeypatch.setattr(Given, "details", lambda task, lines: details)
    assert details_checked(Given(), []) == {"count": 3, "mean": 0.5, "by length": [None]}
    details["kinds"] = {"a", "b"}
    with pytest.raises(UserError, match=r"task 'given': details gave '.*', expected what JSON can hold"):
        details_checked(Given(), [])
