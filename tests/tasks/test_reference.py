"""The published rules, right or wrong, beside a task's own scores."""

import pytest

from stepjepa.data.records import parse_record, read_records
from stepjepa.errors import UserError
from stepjepa.tasks.base import WRONG, Likelihood, Response, Scored, Task, TaskOptions
from stepjepa.tasks.generic import GenericTask
from stepjepa.tasks.gsm8k import Gsm8kTask
from stepjepa.tasks.hellaswag import LETTERS, HellaswagTask
from stepjepa.tasks.nq_open import NqOpenTask
from stepjepa.tasks.reference import ReferenceTask
from stepjepa.tasks.sentiment import SentimentTask


def record(answer, user="question"):
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return parse_record({"messages": messages}, "test.jsonl", 1)


@pytest.mark.parametrize(
    ("task", "truth", "said", "expected", "own"),
    [
        # Text: letter by letter, but for white space at the ends and one special token.
        (GenericTask, "[0-9]+", "[0-9]+", (True, True), True),
        (GenericTask, "[0-9]+", "[0-9]+<|end|>", (True, True), False),
        (SentimentTask, "Good", "good", (False, False), True),
        (SentimentTask, "Good", "Good\nBad", (False, True), True),
        # The last line must be marked, and nothing marked equals nothing marked.
        (Gsm8kTask, "so\n#### 18", "then\n#### 18", (True, False), True),
        (Gsm8kTask, "so\n#### 18", r"then \boxed{18}", (False, False), True),
        (Gsm8kTask, r"so \boxed{18}", "no idea", (True, False), False),
        # The answer within the truth, instead of the truth within the answer.
        (NqOpenTask, "Amma; Adora", "Amma", (True, False), True),
        (NqOpenTask, "Amma; Adora", "mm", (True, False), False),
        (NqOpenTask, "Amma; Adora", "Amma.", (False, False), True),
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


class FakeSpider(Task):
    """Puts in place of results what the test says they are."""

    name, headline, lenient = "spider", "correct", "correct"
    closed = False

    def __init__(self, results):
        self.results = results

    def truth(self, record):
        return record.answer

    def score(self, record, response):
        return Scored({"correct": False}, dict(self.results), WRONG)

    def vote(self, scored, response):
        return "a vote"

    def details(self, lines):
        return {"lines": len(lines)}

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        ("1|a\n2|b\n", "1|a\n2|b\n", True),
        ("1|a\n2|b\n", "2|b\n1|a\n", False),
        ("", "", True),
        # None stands for a query that failed and so printed nothing.
        ("", None, True),
        (None, None, True),
        ("1\n", None, False),
    ],
)
def test_spider_compares_what_a_shell_would_print(truth, answer, right):
    task = ReferenceTask(FakeSpider({"truth_output": truth, "answer_output": answer}))
    assert task.score(record("SELECT 1"), Response("SELECT 2")).scores["reference"] == right


def test_spider_without_results_is_refused():
    with pytest.raises(UserError, match="--scoring reference: the results of the queries are missing"):
        ReferenceTask(FakeSpider({})).score(record("SELECT 1"), Response("SELECT 1"))


def test_all_else_is_the_tasks_own():
    inner = FakeSpider({"truth_output": "1", "answer_output": "1"})
    task = ReferenceTask(inner)
    assert (task.name, task.headline, task.lenient) == ("spider-reference", "reference", "reference_prefix")
    assert ReferenceTask(GenericTask()).name == "generic-reference"
    assert task.vote(inner.score(None, None), Response("x")) == "a vote"
    assert task.details([{}, {}]) == {"lines": 2}
    assert task.truth(record("SELECT 1")) == "SELECT 1"
    records = [record("SELECT 1"), record("SELECT 2")]
    responses = [Response("SELECT 1"), Response("SELECT 2;")]
    together = task.score_all(records, responses)
    assert together == [task.score(*each) for each in zip(records, responses, strict=True)]
    assert [each.scores["reference_prefix"] for each in together] == [True, True]
    task.close()
    assert inner.closed
    with pytest.raises(UserError, match="pass --scoring reference with the task's name"):
        ReferenceTask.from_options(TaskOptions())
