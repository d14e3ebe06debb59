"""Answers compared as text, answers that a solution marks, GSM8K, and verdicts on solutions that a model wrote."""

import json
import math
from collections import Counter

import pytest

from stepjepa.data.sources import read_records
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response
from stepjepa.tasks.generic import BoxedTask, GenericTask, Gsm8kTask
from task_records import record


def judge(task, example, text):
    return task.score(example, Response(text))


def test_generic_tells_exact_from_ran_on_from_mentioned():
    output = ("[0-9]+\n", "[0-9]+[0-9]+", "try [0-9]+", "[0-9]", " ")
    judged = [judge(GenericTask(), record("[0-9]+"), text) for text in output]
    reached = [[name for name, score in scored.scores.items() if score] for scored in judged]
    assert reached == [["exact", "prefix", "contains"], ["prefix", "contains"], ["contains"], [], []]
    assert [scored.error for scored in judged] == [None, WRONG, WRONG, WRONG, NO_ANSWER]


@pytest.mark.parametrize(
    ("text", "reached", "answers", "error"),
    [
        (r"so \boxed{18}", (True, True, True, False), ("18", "18"), None),
        ("#### 18\nuser\n#### 25", (False, True, True, False), ("25", "18"), WRONG),
        ("#### 25\nno\n#### 18", (True, False, True, False), ("18", "25"), None),
        ("6 * 3 = 18\n#### 18\nuser\n#### 25", (False, True, True, True), ("25", "18"), WRONG),
        ("6 * 3 = 18", (False, False, False, False), (None, None), NO_ANSWER),
    ],
)
def test_boxed_reads_marked_answers_and_tells_the_first_from_the_last(text, reached, answers, error):
    scored = judge(BoxedTask(), record("6 * 3 = 18\n#### 18"), text)
    names = ("correct", "first_correct", "answered", "prefix")
    assert tuple(scored.scores[name] for name in names) == reached
    assert scored.extracted == {"truth": "18", "answer": answers[0], "first_answer": answers[1]}
    assert scored.error == error


def test_boxed_votes_are_counted_by_value():
    task, example = BoxedTask(), record(r"\boxed{18}")
    output = [r"\boxed{18.0}", "#### $18", r"\boxed{ \text{a b}}", "18"]
    votes = [task.vote(judge(task, example, text), Response(text)) for text in output]
    assert votes == ["18", "18", "ab", None]


@pytest.mark.parametrize(
    ("answer", "given", "truth"),
    [
        ("#### 17", 18, "18"),
        ("no mark", "steps\n#### 18", "18"),
        (r"\boxed{4}, rather \boxed{5}", None, "5"),
        # A gap of a table.
        (r"\boxed{4}, rather \boxed{5}", math.nan, "5"),
    ],
)
def test_ground_truth_goes_before_the_text(answer, given, truth):
    assert BoxedTask().truth(record(answer, ground_truth=given)) == truth


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("####18", None),
        ("#### Janet's total in dollars is 18", None),
        ("#### 17\nNo: \\boxed{18}", None),
        ("```\n#### 18\n```", None),
        ("#### 18 19", None),
        ("#### 18 (dollars)", None),
        ("#### 18 clips, altogether.", None),
        ("#### USD 18", None),
        ("It is ####18;", None),
        ("####\n18", None),
        ("#### Answer\n18", None),
        # A heading is no answer where there is one.
        ("#### 18\n\n#### Explanation\nIt is 6 * 3.", None),
        ("#### 19 or 18", WRONG),
        ("#### 18\n#### 19 (dollars)", WRONG),
        ("##### 18", NO_ANSWER),
        (r"\boxed{$\$18$}", None),
        # Thought is not said.
        ("<think>#### 19</think>#### 18", None),
        ("<think>#### 18</think>It is eighteen.", NO_ANSWER),
        ("<think>#### 18", NO_ANSWER),
        ("#### eighteen", NO_ANSWER),
        (r"\boxed{}", NO_ANSWER),
        ("They eat **####** 18", None),
        ("#### <<6*3=18>>18", None),
    ],
)
def test_an_answer_is_judged_where_it_is_marked(text, error):
    scored = judge(Gsm8kTask(), record("6 * 3 = <<6*3=18>>18\n#### 18"), text)
    assert scored.error == error
    assert (scored.scores["correct"], scored.scores["answered"]) == (error is None, error != NO_ANSWER)


@pytest.mark.slow
def test_agrees_with_the_verdicts_on_solutions_that_a_model_wrote(shared_data):
    traces = json.loads((shared_data / "traces" / "star_repo_star.detailed_results.json").read_text(encoding="utf-8"))
    records = read_records(shared_data / "llm_jepa" / "gsm8k_test.jsonl")
    verdicts = Counter(
        (judge(Gsm8kTask(), example, trace["full_response"]).error, trace["is_correct"])
        for example, trace in zip(records, traces, strict=True)
    )
    # The published verdicts guess at the last number of a response that marks none. 1199 marks "8 / 3 = 2 with a
    # remainder", then the right 2; the 8 was read. Another says "**####** 16", which is right; one "**####** days ...
    # to 600 inches. The answer is: **12**", where 600 is the first number.
    assert verdicts == {
        (None, True): 793,
        (None, False): 2,
        (WRONG, False): 378,
        (WRONG, True): 1,
        (NO_ANSWER, True): 42,
        (NO_ANSWER, False): 103,
    }
