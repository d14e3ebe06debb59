"""The published rules, right or wrong, beside a task's own scores."""

import pytest

from stepjepa.data.sources import read_records
from stepjepa.tasks.base import Likelihood, Response
from stepjepa.tasks.generic import GenericTask, Gsm8kTask
from stepjepa.tasks.hellaswag import LETTERS, HellaswagTask
from stepjepa.tasks.nq_open import NqOpenTask
from stepjepa.tasks.reference import with_published_rules
from stepjepa.tasks.sentiment import SentimentTask
from task_records import record


def judge(task, example, *response):
    return with_published_rules(task()).score_all([example], [Response(*response)])[0]


@pytest.mark.parametrize(
    ("task", "truth", "said", "expected", "own"),
    [
        # Text: letter by letter, but for white space at the ends and one special token.
        (GenericTask, "[0-9]+", "[0-9]+<|end|>", (True, True), False),
        (SentimentTask, "Good", "Good\nBad", (False, True), True),
        # The last line must be marked, and nothing marked equals nothing marked.
        (Gsm8kTask, "so\n#### 18", "then\n#### 18", (True, False), True),
        (Gsm8kTask, "so\n#### 18", r"then \boxed{18}", (False, False), True),
        (Gsm8kTask, r"so \boxed{18}", "no idea", (True, False), False),
        # A tail is told from a number, a thought from nothing.
        (Gsm8kTask, "so\n#### 18", "then\n#### 18 (eggs)", (False, False), True),
        (GenericTask, "[0-9]+", "<think>\nno\n</think>\n\n[0-9]+", (False, False), True),
        # The answer within the truth, instead of the truth within the answer.
        (NqOpenTask, "Amma; Adora", "mm", (True, False), False),
        (NqOpenTask, "Amma; Adora", "It was Amma", (False, False), False),
    ],
)
def test_published_verdicts_right_or_wrong(task, truth, said, expected, own):
    scored = judge(task, record(truth), said)
    (_, reference), (_, prefix), *others = scored.scores.items()
    assert list(scored.scores)[:2] == ["reference", "reference_prefix"]
    assert (reference, prefix) == expected
    assert dict(others) == task().score(record(truth), Response(said)).scores
    assert scored.scores[task.headline] == own
    assert (scored.error is None) == expected[0]


def test_hellaswag_goes_by_the_likelihoods(shared_data):
    example = read_records(shared_data / "llm_jepa" / "hellaswag_test.jsonl")[0]
    labels = [each.label for each in HellaswagTask().continuations(example)]
    for output in ("A", "B", ""):
        for likely in LETTERS:
            result = {label: Likelihood(-1.0 if label.endswith(likely) else -2.0, 1) for label in labels}
            scored = judge(HellaswagTask, example, output, result)
            assert scored.scores["reference"] == (likely == HellaswagTask().truth(example))
            assert scored.scores["reference_prefix"] == scored.scores["reference"]
        assert judge(HellaswagTask, example, output).scores["reference"] == (output == HellaswagTask().truth(example))


def test_the_name_and_the_headline_say_which_rules():
    task = with_published_rules(SentimentTask())
    assert (task.name, task.headline, task.lenient) == ("sentiment-reference", "reference", "reference_prefix")
