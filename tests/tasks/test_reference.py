"""The published rules, right or wrong, beside a task's own scores."""

import pytest

from stepjepa.data.sources import read_records
from stepjepa.tasks.base import Likelihood, Response
from stepjepa.tasks.generic import GenericTask, Gsm8kTask
from stepjepa.tasks.hellaswag import LETTERS, HellaswagTask
from stepjepa.tasks.nq_open import NqOpenTask
from stepjepa.tasks.registry import ReferenceTask
from stepjepa.tasks.sentiment import SentimentTask
from task_records import record


@pytest.mark.parametrize(
    ("task", "truth", "said", "expected", "own"),
    [
        # Text: letter by letter, but for white space at the ends and one special token.
        (GenericTask, "[0-9]+", "[0-9]+", (True, True), True),
        (GenericTask, "[0-9]+", "[0-9]+<|end|>", (True, True), False),
        (SentimentTask, "Good", "Good\nBad", (False, True), True),
        # The last line must be marked, and nothing marked equals nothing marked.
        (Gsm8kTask, "so\n#### 18", "then\n#### 18", (True, False), True),
        (Gsm8kTask, "so\n#### 18", r"then \boxed{18}", (False, False), True),
        (Gsm8kTask, r"so \boxed{18}", "no idea", (True, False), False),
        # The answer within the truth, instead of the truth within the answer.
        (NqOpenTask, "Amma; Adora", "Amma", (True, False), True),
        (NqOpenTask, "Amma; Adora", "mm", (True, False), False),
        (NqOpenTask, "Amma; Adora", "It was Amma", (False, False), False),
    ],
)
def test_published_verdicts_right_or_wrong(task, truth, said, expected, own):
    wrapped = task()
    scored = ReferenceTask(wrapped).score(record(truth), Response(said))
    assert list(scored.scores)[:2] == ["reference", "reference_prefix"]
    assert (scored.scores["reference"], scored.scores["reference_prefix"]) == expected
    assert scored.scores[task.headline] == own
    assert {name: scored.scores[name] for name in list(scored.scores)[2:]} == wrapped.score(
        record(truth), Response(said)
    ).scores
    assert (scored.error is None) == expected[0]


def test_hellaswag_goes_by_the_likelihoods(shared_data):
    example = read_records(shared_data / "llm_jepa" / "hellaswag_test.jsonl")[0]
    task = ReferenceTask(HellaswagTask())
    assert task.continuations(example) == HellaswagTask().continuations(example)
    labels = [each.label for each in task.continuations(example)]
    for said in ("A", "B", ""):
        for likely in LETTERS:
            found = {label: Likelihood(-1.0 if label.endswith(likely) else -2.0, 1) for label in labels}
            scored = task.score(example, Response(said, found))
            assert scored.scores["reference"] == (likely == task.truth(example))
            assert scored.scores["reference_prefix"] == scored.scores["reference"]
        assert task.score(example, Response(said)).scores["reference"] == (said == task.truth(example))


def test_truth_votes_and_details_are_those_of_the_task():
    own = SentimentTask()
    task, example, response = ReferenceTask(own), record("Good"), Response("Good.")
    scored = task.score(example, response)
    assert (task.name, task.headline, task.lenient) == ("sentiment-reference", "reference", "reference_prefix")
    assert task.truth(example) == "Good"
    assert task.vote(scored, response) == own.vote(scored, response) == "Good"
    lines = [{"extracted": scored.extracted, "scores": scored.scores}]
    assert task.details(lines) == own.details(lines)
