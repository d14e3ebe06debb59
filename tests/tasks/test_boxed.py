"""Answers compared as text, and answers that a solution marks."""

import pytest

from stepjepa.tasks.base import NO_ANSWER, WRONG, Response
from stepjepa.tasks.generic import BoxedTask, GenericTask
from task_records import record


def judge(task, example, text):
    return task.score(example, Response(text))


def test_generic_tells_exact_from_ran_on_from_mentioned():
    task, example = GenericTask(), record("[0-9]+")
    said = ("[0-9]+\n", "[0-9]+[0-9]+", "try [0-9]+", "[0-9]", " ")
    judged = [judge(task, example, text) for text in said]
    reached = [[name for name, score in scored.scores.items() if score] for scored in judged]
    assert reached == [["exact", "prefix", "contains"], ["prefix", "contains"], ["contains"], [], []]
    assert [scored.error for scored in judged] == [None, WRONG, WRONG, WRONG, NO_ANSWER]


def test_boxed_reads_marked_answers_and_tells_the_first_from_the_last():
    task, example = BoxedTask(), record("6 * 3 = 18\n#### 18")
    said = {
        r"so \boxed{18}": (True, True, True),
        "#### 18\nuser\n#### 25": (False, True, True),
        "#### 25\nno\n#### 18": (True, False, True),
        "6 * 3 = 18": (False, False, False),
        "": (False, False, False),
        "#### 18 or 19": (False, False, True),
    }
    assert {text: tuple(judge(task, example, text).scores.values())[:3] for text in said} == said
    # Beside them, the whole text against the whole solution.
    names = ("exact", "prefix", "contains")
    for more, expected in (("\n", (True, True, True)), ("\nuser\n#### 25", (False, True, True))):
        scores = judge(task, example, f"6 * 3 = 18\n#### 18{more}").scores
        assert list(scores) == ["correct", "first_correct", "answered", *names]
        assert tuple(scores[name] for name in names) == expected
    scored = judge(task, example, "#### 25\n#### 17")
    assert (scored.extracted, scored.error) == ({"truth": "18", "answer": "17", "first_answer": "25"}, WRONG)
    scored = judge(task, example, "18")
    assert (scored.extracted, scored.error) == ({"truth": "18", "answer": None, "first_answer": None}, NO_ANSWER)


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
