"""Tasks: who takes a record, what the truth is, what is scored."""

import pytest

from stepjepa.data.records import parse_record
from stepjepa.errors import UserError
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response
from stepjepa.tasks.boxed import BoxedTask
from stepjepa.tasks.generic import GenericTask
from stepjepa.tasks.registry import choose_task


def record(answer, line=1, **extra):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return parse_record({"messages": messages, **extra}, "test.jsonl", line)


def judge(task, example, text):
    return task.score(example, Response(text))


def test_generic_tells_exact_from_ran_on_from_mentioned():
    task, example = GenericTask(), record("[0-9]+")
    assert task.truth(example) == "[0-9]+"
    said = ("[0-9]+\n", "[0-9]+[0-9]+", "try [0-9]+", "[0-9]", " ")
    judged = [judge(task, example, text) for text in said]
    assert [tuple(scored.scores.values()) for scored in judged] == [
        (True, True, True),
        (False, True, True),
        (False, False, True),
        (False, False, False),
        (False, False, False),
    ]
    assert [scored.error for scored in judged] == [None, WRONG, WRONG, WRONG, NO_ANSWER]
    assert list(judged[0].scores) == ["exact", "prefix", "contains"]


def test_boxed_reads_marked_answers_and_tells_the_first_from_the_last():
    task, example = BoxedTask(), record("6 * 3 = 18\n#### 18")
    said = {
        "6 * 3 = 18\n#### 18.0": (True, True, True),
        r"so \boxed{18}": (True, True, True),
        "#### 18\nuser\n#### 25": (False, True, True),
        "#### 25\nno\n#### 18": (True, False, True),
        "6 * 3 = 18": (False, False, False),
        "": (False, False, False),
        "#### ": (False, False, False),
        "#### 25": (False, False, True),
        "#### The answer is 18.": (True, True, True),
        "#### 18 or 19": (False, False, True),
        "#### Conclusion": (False, False, True),
    }
    assert {text: tuple(judge(task, example, text).scores.values())[:3] for text in said} == said
    # Beside them, the whole text against the whole solution.
    ran_on = judge(task, example, "6 * 3 = 18\n#### 18\n").scores
    assert (ran_on["exact"], ran_on["prefix"], ran_on["contains"]) == (True, True, True)
    ran_on = judge(task, example, "6 * 3 = 18\n#### 18\nuser\n#### 25").scores
    assert (ran_on["exact"], ran_on["prefix"], ran_on["contains"]) == (False, True, True)
    assert list(judge(task, example, "").scores) == [
        "correct",
        "first_correct",
        "answered",
        "exact",
        "prefix",
        "contains",
    ]
    assert judge(task, example, "#### 25\n#### 17").extracted == {"truth": "18", "answer": "17", "first_answer": "25"}
    assert judge(task, example, "18").extracted == {"truth": "18", "answer": None, "first_answer": None}
    assert [judge(task, example, text).error for text in ("#### 18", "#### 25", "18")] == [None, WRONG, NO_ANSWER]


def test_boxed_votes_are_counted_by_value():
    task, example = BoxedTask(), record(r"\boxed{18}")
    said = [r"\boxed{18.0}", "#### $18", r"\boxed{ \text{a b}}", "18"]
    votes = [task.vote(judge(task, example, text), Response(text)) for text in said]
    assert votes == ["18", "18", "ab", None]


@pytest.mark.parametrize(
    ("answer", "given", "truth"),
    [
        ("#### 17", None, "17"),
        ("#### 17", 18, "18"),
        ("no mark", "steps\n#### 18", "18"),
        ("no mark", r"\boxed{18}", "18"),
        (r"\boxed{4}, rather \boxed{5}", None, "5"),
    ],
)
def test_ground_truth_goes_before_the_text(answer, given, truth):
    assert BoxedTask().truth(record(answer, ground_truth=given)) == truth


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ["no answer to compare with", "ground_truth", "--task generic"]),
        ({"ground_truth": [18]}, ["'ground_truth' is list"]),
        ({"ground_truth": True}, ["'ground_truth' is bool"]),
        ({"ground_truth": "  "}, ["'ground_truth' is empty"]),
    ],
)
def test_a_record_without_a_usable_truth_is_refused_with_its_place(extra, words):
    with pytest.raises(UserError) as caught:
        BoxedTask().truth(record("no mark", 7, **extra))
    assert str(caught.value).startswith("test.jsonl:7: ")
    assert all(word in str(caught.value) for word in words)


def test_auto_takes_what_all_records_are():
    assert choose_task("auto", [record("#### 1", ground_truth="1"), record(r"\boxed{2}")]).name == "boxed"
    assert choose_task("auto", [record("Good"), record("Bad")]).name == "generic"
    assert choose_task("auto", [record("steps", ground_truth="18")]).name == "boxed"
    assert choose_task("auto", [record("A story.", ground_truth="A tale.")]).name == "generic"


def test_auto_refuses_a_mixture_and_names_the_first_stranger():
    records = [record(r"\boxed{1}", 1), record("Good", 2), record(r"\boxed{3}", 3)]
    with pytest.raises(UserError, match=r"test\.jsonl:2: .*2 of 3 records look like 'boxed'.*--task generic"):
        choose_task("auto", records)
    assert choose_task("generic", records).name == "generic"
