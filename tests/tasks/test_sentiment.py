"""Sentiment: labels read from answers, balanced accuracy."""

import pytest

from stepjepa.tasks.base import NO_ANSWER, WRONG, Response
from stepjepa.tasks.sentiment import SentimentTask
from task_records import record

TASK = SentimentTask()


# Which scores an answer reaches: c(orrect), e(xact), f(irst_word), p(refix), s(ide, the polarity).
@pytest.mark.parametrize(
    ("truth", "said", "expected"),
    [
        # The label, alone, in more words, or with more behind it.
        ("Good", "Good", "cefps"),
        ("Good", "Good movie", "cfps"),
        ("Good", "The sentiment of the comment is: Good", "c_s"),
        ("Good", "This is a good review", "c_s"),
        ("Good", "```\nGood\n```", "cf_s"),
        ("Bad", "This is not a good review", ""),
        ("Good", "I do not think it is good", ""),
        # Another label, or a longer one.
        ("Good", "Bad", ""),
        ("Very Bad", "Bad", "s"),
        # Both, or none.
        ("Good", "Good or Bad", "fp"),
        ("Good", "Good or Very Good", "fp"),
        ("Good", "", ""),
        ("Good", "Good-natured", "p"),
        ("Good", "A film that has a good cast", ""),
        # The words of the prompt: the side is right, the label is not given.
        ("Good", "Positive", "s"),
        ("Good", "Good, negative", "fp"),
    ],
)
def test_verdicts(truth, said, expected):
    scored = TASK.score(record(truth), Response(said))
    assert list(scored.scores) == ["correct", "exact", "first_word", "prefix", "polarity"]
    reached = {letter for letter, score in zip("cefps", scored.scores.values(), strict=True) if score}
    assert reached == set(expected) - {"_"}
    assert (scored.error is None) == scored.scores["correct"]


def test_errors_and_what_was_read():
    scored = TASK.score(record("Good"), Response("It is very bad."))
    assert scored.extracted == {"truth": "Good", "answer": "Very Bad"}
    assert scored.error == WRONG
    assert TASK.vote(scored, Response("It is very bad.")) == "Very Bad"
    assert TASK.score(record("Good"), Response("Good or Bad")).error == NO_ANSWER


def test_details_count_by_class():
    pairs = [("Good", "Good")] * 6 + [("Good", "Bad")] * 2 + [("Bad", "bad."), ("Bad", "?")]
    result = TASK.details(
        [{"extracted": TASK.score(record(truth), Response(output)).extracted} for truth, output in pairs]
    )
    assert result == {
        # (6/8 + 1/2) / 2; plain accuracy would be 7/10.
        "balanced_accuracy": 0.625,
        "recall": {"Bad": 0.5, "Good": 0.75},
        "count": {"Bad": 2, "Good": 8},
        "confusion": {"Bad": {"Bad": 1, "Good": 0, "other": 1}, "Good": {"Bad": 2, "Good": 6, "other": 0}},
    }
