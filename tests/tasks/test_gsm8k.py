"""GSM8K: answers as a person would judge them, and verdicts on solutions that a model wrote."""

import json
from collections import Counter

import pytest

from stepjepa.data.sources import read_records
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, TaskOptions
from stepjepa.tasks.generic import Gsm8kTask
from task_records import record

SOLUTION = (
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"
)


def judge(text, truth=SOLUTION, **options):
    return Gsm8kTask.from_options(TaskOptions(**options)).score(record(truth), Response(text))


RIGHT = [
    SOLUTION,
    "####18",
    "#### Janet's total in dollars is 18",
    r"so \boxed{18}.",
    r"\boxed{18 \text{ dollars}}",
    "#### 17\nNo, 9 * 2 is more.\n#### 18",
    "#### 17\nNo: \\boxed{18}",
    "```\n#### 18\n```",
]

WRONG_ONES = [
    "#### 17",
    "#### 18 19",
    "#### not 18",
    "\\boxed{18}\n#### 17",
    r"\boxed{17}",
]

UNMARKED = [
    "",
    "18",
    "####",
    "#### eighteen",
    r"\boxed{}",
    "They eat **####** 18",
]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *((text, None) for text in RIGHT),
        *((text, WRONG) for text in WRONG_ONES),
        *((text, NO_ANSWER) for text in UNMARKED),
    ],
)
def test_an_answer_is_judged_where_it_is_marked(text, error):
    scored = judge(text)
    assert scored.error == error
    assert scored.scores["correct"] is (error is None)
    assert scored.scores["answered"] is (error != NO_ANSWER) is (scored.extracted["answer"] is not None)


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("She makes 9 * 2 = 18.", False, True),
        ("#### 17\nor rather 18", False, False),
        ("#### Conclusion\nShe makes 18.", False, True),
        ("", False, False),
    ],
)
def test_the_last_number_counts_apart_and_only_when_asked_for(text, strict, lenient):
    asked, plain = judge(text, last_number=True), judge(text)
    assert (asked.scores["correct"], asked.scores["last_number_correct"]) == (strict, lenient)
    assert asked.error == plain.error
    assert "last_number_correct" not in plain.scores
    assert {name: asked.scores[name] for name in plain.scores} == plain.scores


def test_agrees_with_the_verdicts_on_solutions_that_a_model_wrote(shared_data):
    traces = json.loads((shared_data / "traces" / "star_repo_star.detailed_results.json").read_text(encoding="utf-8"))
    records = read_records(shared_data / "llm_jepa" / "gsm8k_test.jsonl")
    task, strict, lenient = Gsm8kTask.from_options(TaskOptions(last_number=True)), Counter(), []
    for example, trace in zip(records, traces, strict=True):
        scored = task.score(example, Response(trace["full_response"]))
        strict[scored.error, trace["is_correct"]] += 1
        if scored.scores["last_number_correct"] is not trace["is_correct"]:
            lenient.append(trace["index"])
    # The published verdicts guess at the last number of a response that marks none, and so does the lenient score.
    assert strict == {
        (None, True): 747,
        (None, False): 1,
        (WRONG, False): 371,
        (NO_ANSWER, True): 89,
        (NO_ANSWER, False): 111,
    }
    # 504 ends in "11. There must be another pack": no answer at all, said to be right. 899 ends in "will receive 16
    # cookies. ####", and 16 is right. 1199 marks "8 / 3 = 2 with a remainder", then the right 2; the 8 was read.
    assert lenient == [504, 899, 1199]
