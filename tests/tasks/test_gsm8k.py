"""GSM8K: answers as a person would judge them, the original files, and verdicts on solutions that a model wrote."""

import json
from collections import Counter

import pytest

from stepjepa.data.records import parse_record, read_records
from stepjepa.data.steps import find_steps
from stepjepa.errors import UserError
from stepjepa.files import read_jsonl
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, TaskOptions, Unusable
from stepjepa.tasks.gsm8k import Gsm8kTask
from stepjepa.tasks.registry import choose_task

SOLUTION = (
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"
)


def record(answer=SOLUTION, path="test.jsonl", system=None, **extra):
    messages = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": answer}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return parse_record({"messages": messages, **extra}, path, 7)


def judge(text, example=None, **options):
    return Gsm8kTask.from_options(TaskOptions(**options)).score(example or record(), Response(text))


RIGHT = [
    SOLUTION,
    "####18",
    "#### 18.00",
    r"#### \$18",
    "#### 18 dollars per day",
    "#### **18**",
    "#### 17 2/2",
    "#### The final answer is 18.",
    "#### 9 * 2 = 18",
    "#### Janet's total in dollars is 18",
    r"so \boxed{18}.",
    r"\boxed{18 \text{ dollars}}",
    "#### 17\nNo, 9 * 2 is more.\n#### 18",
    "#### 17\nNo: \\boxed{18}",
    "#### 18\u200b",
    "#### (18)",
    "```\n#### 18\n```",
    r"\boxed{1.8 \times 10}".replace("10}", "10^1}"),
]

WRONG_ONES = [
    "#### 17",
    "#### 18.01",
    "#### 18k",
    "#### 18 19",
    "#### 17 and 18",
    "#### not 18",
    "#### The answer is not 18.",
    "#### It might be 18",
    "#### x > 18",
    "#### 18 = 9 * 2",
    "\\boxed{18}\n#### 17",
    r"\boxed{17}",
    "#### 1e999999999",
    "#### 18 squared",
    "#### ١٨٠",
]

UNMARKED = [
    "",
    "18",
    "The final answer is 18.",
    "####",
    "### 18",
    "# 18",
    "#### eighteen",
    r"\boxed{}",
    r"\boxed 18",
    "They eat **####** 18",
]


@pytest.mark.parametrize("text", RIGHT)
def test_right(text):
    scored = judge(text)
    assert scored.scores["correct"] is True
    assert scored.scores["answered"] is True
    assert scored.error is None


@pytest.mark.parametrize("text", WRONG_ONES)
def test_wrong(text):
    scored = judge(text)
    assert scored.scores["correct"] is False
    assert scored.scores["answered"] is True
    assert scored.error == WRONG


@pytest.mark.parametrize("text", UNMARKED)
def test_an_answer_that_is_not_marked_is_none(text):
    scored = judge(text)
    assert scored.scores["correct"] is False
    assert scored.scores["answered"] is False
    assert (scored.error, scored.extracted["answer"]) == (NO_ANSWER, None)


@pytest.mark.parametrize(
    ("said", "truth", "right"),
    [
        ("1,234", "1234", True),
        ("1 234", "1234", False),
        ("0", "-0", True),
        ("5 dollars less, -5", "-5", False),
        ("0.5", "1/2", True),
        ("50%", "0.5", False),
        ("9007199254740993", "9007199254740992", False),
        ("5 cents", "$5", False),
        ("5 apples", "5", True),
    ],
)
def test_numbers_and_units(said, truth, right):
    assert judge(f"#### {said}", record(f"#### {truth}")).scores["correct"] is right


def test_scores_beside_the_headline():
    scored = judge("#### 18\nuser\n#### 25")
    assert (scored.scores["correct"], scored.scores["first_correct"]) == (False, True)
    assert scored.extracted == {"truth": "18", "answer": "25", "first_answer": "18"}
    ran_on = judge(SOLUTION + "\nassistant").scores
    assert (ran_on["correct"], ran_on["exact"], ran_on["prefix"], ran_on["contains"]) == (True, False, True, True)
    assert list(ran_on) == ["correct", "first_correct", "answered", "exact", "prefix", "contains"]


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("She makes 9 * 2 = 18.", False, True),
        ("18", False, True),
        ("#### 17\nor rather 18", False, False),
        ("#### 18 or 19", False, False),
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


@pytest.mark.parametrize(
    "example",
    [
        record(),
        record(r"\boxed{18}", "folder/GSM8K_mine.jsonl"),
        record("#### 18 \n"),
    ],
)
def test_recognised_by_content_or_name(example):
    assert Gsm8kTask.recognises(example)
    assert choose_task("auto", [example]).name == "gsm8k"


@pytest.mark.parametrize(
    "example",
    [
        record(r"\boxed{18}"),
        record("#### 18\nmore"),
        record("so #### 18"),
        record(ground_truth="18"),
        record("18", system=Gsm8kTask.system_prompt + " Now."),
    ],
)
def test_not_recognised(example):
    assert not Gsm8kTask.recognises(example)


def test_truth_must_be_a_number():
    assert Gsm8kTask().truth(record(r"\boxed{18}", ground_truth="1,005")) == "1,005"
    with pytest.raises(UserError, match=r"test\.jsonl:7: the right answer is 'Friday', no number; .*--task boxed"):
        Gsm8kTask().truth(record(ground_truth="Friday"))
    with pytest.raises(UserError, match=r"test\.jsonl:7: no answer to compare with"):
        Gsm8kTask().truth(record("no mark"))


def test_the_option_reaches_the_task():
    options = TaskOptions(last_number=True)
    assert choose_task("auto", [record()], options).options.last_number is True
    with pytest.raises(UserError, match="--last_number does nothing with task 'boxed'"):
        choose_task("boxed", [record()], options)


ROW = {"question": "How much?", "answer": SOLUTION}
SOCRATIC = {
    "question": "How much?",
    "answer": "How many eggs? ** 16 - 7 = <<16-7=9>>9.\nHow much money? ** 9 * 2 = $<<9*2=18>>18.\n#### 18",
}


def said(row, **options):
    return Gsm8kTask.convert(row, **options)["messages"][-1]["content"]


def test_a_row_becomes_a_record():
    roles = [("system", Gsm8kTask.system_prompt), ("user", "How much?"), ("assistant", SOLUTION)]
    assert Gsm8kTask.convert(ROW) == {"messages": [{"role": role, "content": content} for role, content in roles]}
    parse_record(Gsm8kTask.convert(ROW))


def test_lines_become_steps_and_the_answer_stays_with_the_last():
    converted = Gsm8kTask.convert(
        {**ROW, "answer": SOLUTION.replace("\n", "\r\n", 1).replace("\n####", "\n\n \n####")}, steps=True
    )
    assert converted["total_steps"] == 2
    text = converted["messages"][-1]["content"]
    steps = [text[step.start : step.end].rstrip() for step in find_steps(text)]
    first, second, last = SOLUTION.split("\n")
    assert steps == [first, f"{second}\n{last}"]


def test_questions_and_annotations_are_kept_or_stripped():
    assert said(SOCRATIC) == SOCRATIC["answer"]
    assert said(SOCRATIC, socratic=False) == "16 - 7 = <<16-7=9>>9.\n9 * 2 = $<<9*2=18>>18.\n#### 18"
    assert said(SOCRATIC, socratic=False, calculator=False) == "16 - 7 = 9.\n9 * 2 = $18.\n#### 18"
    assert said(SOCRATIC, calculator=False, steps=True) == (
        "How many eggs? ** 16 - 7 = 9.\n\nHow much money? ** 9 * 2 = $18.\n#### 18"
    )
    assert said(ROW, socratic=False) == SOLUTION
    assert said({**ROW, "answer": "2 << 3 and 4 >> 1\n#### 5"}, calculator=False) == "2 << 3 and 4 >> 1\n#### 5"


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"question": None}, {}, "no field 'question'"),
        ({"answer": "18"}, {}, "'answer' does not end in a line '#### number'"),
        ({"answer": "9 * 2 = 18\n#### 18"}, {"steps": True}, "fewer than two steps"),
    ],
)
def test_unusable_rows(changes, options, reason):
    with pytest.raises(Unusable) as caught:
        Gsm8kTask.convert({**ROW, **changes}, **options)
    assert str(caught.value) == reason


def test_socratic_rows_give_the_published_test_file(shared_data):
    published = [value for _, value in read_jsonl(shared_data / "llm_jepa" / "gsm8k_test.jsonl")]
    rows = [row for _, row in read_jsonl(shared_data / "gsm8k" / "test_socratic.jsonl")]
    assert len(rows) == 1319
    assert [Gsm8kTask.convert(row, socratic=False) for row in rows] == published
    steps = [Gsm8kTask.convert(row, socratic=False, steps=True) for row in rows]
    assert all(len(find_steps(one["messages"][-1]["content"])) == one["total_steps"] >= 2 for one in steps)


@pytest.mark.parametrize(
    "file", ["llm_jepa/gsm8k_train.jsonl", "llm_jepa/gsm8k_test.jsonl", "gsm8k/test_socratic.jsonl"]
)
def test_gold_is_right_and_another_gold_is_not(shared_data, file):
    path = shared_data / file
    if path.parent.name == "gsm8k":
        records = [parse_record(Gsm8kTask.convert(row), str(path), line) for line, row in read_jsonl(path)]
    else:
        records = read_records(path)
    task = choose_task("auto", records)
    assert task.name == "gsm8k"
    assert all(all(task.score(example, Response(example.answer)).scores.values()) for example in records)
    half = len(records) // 2
    pairs = [
        (one, other)
        for one, other in zip(records, records[half:], strict=False)
        if task.truth(one) != task.truth(other)
    ]
    assert len(pairs) > 600
    assert not any(task.score(one, Response(other.answer)).scores["correct"] for one, other in pairs)


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
