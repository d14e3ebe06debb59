"""Sentiment: labels read from answers, two data sets with one prompt, balanced accuracy."""

import time
from collections import Counter

import pytest

from stepjepa.data.records import parse_record, read_records
from stepjepa.errors import UserError
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Unusable
from stepjepa.tasks.sentiment import STARS, SentimentTask

TASK = SentimentTask()


def record(answer="Good", user="a fine film", system=SentimentTask.system_prompt, path="test.jsonl"):
    messages = [("system", system), ("user", user), ("assistant", answer)]
    return parse_record({"messages": [{"role": role, "content": content} for role, content in messages]}, path, 1)


# Which scores an answer reaches: c(orrect), e(xact), f(irst_word), p(refix), s(ide, the polarity).
@pytest.mark.parametrize(
    ("truth", "said", "expected"),
    [
        # The label.
        ("Good", "Good", "cefps"),
        ("Good", "Good.", "cfps"),
        ("Good", "**Good**", "cf_s"),
        ("Very Bad", "Very Bad", "cefps"),
        # In more words, or with more behind it.
        ("Good", "Good movie", "cfps"),
        ("Good", "The sentiment of the comment is: Good", "c_s"),
        ("Good", "This is a good review", "c_s"),
        ("Good", "```\nGood\n```", "cf_s"),
        ("Bad", "This is not a good review", ""),
        # Another label, or a longer one.
        ("Good", "Bad", ""),
        ("Very Bad", "Bad", "s"),
        ("Good", "Mediocre", ""),
        # Both, or none.
        ("Good", "Good or Bad", "fp"),
        ("Good", "Bad? No, Good", ""),
        ("Good", "", ""),
        ("Good", "!!!", ""),
        ("Good", "Good-natured", "p"),
        ("Good", "A film that has a good cast", ""),
        # The words of the prompt: the side is right, the label is not given.
        ("Good", "Positive", "s"),
        ("Good", "Good (positive)", "cfps"),
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
    for nothing in ("", "Fine", "Good or Bad"):
        scored = TASK.score(record("Good"), Response(nothing))
        assert (scored.extracted["answer"], scored.error) == (None, NO_ANSWER)


def test_only_known_labels_are_truths():
    assert TASK.truth(record(" Good ")) == "Good"
    with pytest.raises(UserError, match=r"^test\.jsonl:1: .*'positive', expected Very Bad, Bad.*--task generic"):
        TASK.truth(record("positive"))


def test_known_by_prompt_or_file_name():
    assert TASK.recognises(record(path="/elsewhere/mine.jsonl"))
    for name in ("yelp_test.jsonl", "Rotten-Tomatoes.jsonl", "rotten_tomatoes_train.jsonl"):
        assert TASK.recognises(record(system="Judge.", path=f"/elsewhere/{name}"))
    assert not TASK.recognises(record(system="Judge.", path="yelp/other.jsonl"))


def lines_of(*pairs):
    lines = []
    for truth, said, times in pairs:
        scored = TASK.score(record(truth), Response(said))
        lines += [{"extracted": scored.extracted, "scores": scored.scores}] * times
    return lines


def test_details_count_by_class():
    found = TASK.details(lines_of(("Good", "Good", 6), ("Good", "Bad", 2), ("Bad", "bad.", 1), ("Bad", "?", 1)))
    assert found == {
        # (6/8 + 1/2) / 2; plain accuracy would be 7/10.
        "balanced_accuracy": 0.625,
        "recall": {"Bad": 0.5, "Good": 0.75},
        "count": {"Bad": 2, "Good": 8},
        "confusion": {
            "Bad": {"Bad": 1, "Good": 0, "other": 1},
            "Good": {"Bad": 2, "Good": 6, "other": 0},
        },
    }


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("rotten_tomatoes_test", {"Good": 533, "Bad": 533}),
        ("rotten_tomatoes_train", {"Good": 4265, "Bad": 4265}),
        ("yelp_test", {"Very Bad": 220, "Bad": 213, "Mediocre": 196, "Good": 205, "Very Good": 166}),
    ],
)
def test_real_files_gold_is_right_and_every_other_label_is_not(shared_data, file, counts):
    records = read_records(shared_data / "llm_jepa" / f"{file}.jsonl")
    assert all(TASK.recognises(each) for each in records)
    assert Counter(TASK.truth(each) for each in records) == counts
    lines = []
    for each in records:
        scored = TASK.score(each, Response(each.answer))
        assert all(scored.scores.values())
        lines.append({"extracted": scored.extracted, "scores": scored.scores})
        for label in set(STARS) - {each.answer}:
            wrong = TASK.score(each, Response(label)).scores
            assert not any(wrong[name] for name in ("correct", "exact", "first_word", "prefix"))
    found = TASK.details(lines)
    assert found["balanced_accuracy"] == 1.0
    assert found["count"] == counts


@pytest.mark.parametrize(
    "text", ["Good " * 200_000, "_" * 10**6, "the " * 200_000, " " * 10**6, "very " * 200_000, "it is :" + " " * 10**6]
)
def test_long_answers_take_no_longer_than_reading_them(text):
    begin = time.process_time()
    TASK.score(record(), Response(text))
    assert time.process_time() - begin < 5


def test_convert_makes_the_published_form(shared_data):
    folder = shared_data / "llm_jepa"
    for each in read_records(folder / "rotten_tomatoes_test.jsonl")[::50]:
        row = {"text": each.messages[1]["content"], "label": ("Bad", "Good").index(each.answer)}
        assert parse_record(SentimentTask.convert(row)).messages == each.messages
    for each in read_records(folder / "yelp_test.jsonl")[::50]:
        row = {"text": each.messages[1]["content"], "label": str(STARS.index(each.answer))}
        assert parse_record(SentimentTask.convert(row, stars=True)).messages == each.messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "", "label": 1}, "no text"),
        ({"text": "fine"}, "no label"),
        ({"text": "fine", "label": None}, "no label"),
        ({"text": "fine", "label": "Good"}, "the label is none of 0, 1"),
    ],
)
def test_convert_says_why_not(row, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        SentimentTask.convert(row)
    if reason.startswith("no "):
        with pytest.raises(Unusable, match=f"^{reason}$"):
            SentimentTask.convert(row, stars=True)
