"""Tasks: who takes a record, what the truth is, what is scored."""

import pytest

from stepjepa.errors import UserError
from stepjepa.records import parse_record, read_records
from stepjepa.tasks.base import TASK_NAMES, all_tasks, choose_task
from stepjepa.tasks.boxed import BoxedTask
from stepjepa.tasks.generic import GenericTask


def record(answer, line=1, **extra):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return parse_record({"messages": messages, **extra}, "test.jsonl", line)


def test_generic_tells_exact_from_ran_on_from_mentioned():
    task, example = GenericTask(), record("[0-9]+")
    assert task.truth(example) == "[0-9]+"
    scores = [task.score(example, said).scores for said in ("[0-9]+\n", "[0-9]+[0-9]+", "try [0-9]+", "[0-9]")]
    assert [tuple(score.values()) for score in scores] == [
        (True, True, True),
        (False, True, True),
        (False, False, True),
        (False, False, False),
    ]
    assert list(scores[0]) == ["exact", "prefix", "contains"]


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
    }
    assert {text: tuple(task.score(example, text).scores.values())[:3] for text in said} == said
    # Beside them, the whole text against the whole solution.
    ran_on = task.score(example, "6 * 3 = 18\n#### 18\n").scores
    assert (ran_on["exact"], ran_on["prefix"], ran_on["contains"]) == (True, True, True)
    ran_on = task.score(example, "6 * 3 = 18\n#### 18\nuser\n#### 25").scores
    assert (ran_on["exact"], ran_on["prefix"], ran_on["contains"]) == (False, True, True)
    assert list(task.score(example, "").scores) == [
        "correct",
        "first_correct",
        "answered",
        "exact",
        "prefix",
        "contains",
    ]
    assert task.score(example, "#### 25\n#### 17").extracted == {"truth": "18", "answer": "17", "first_answer": "25"}
    assert task.score(example, "18").extracted == {"truth": "18", "answer": None, "first_answer": None}


@pytest.mark.parametrize(
    ("answer", "given", "truth"),
    [
        ("#### 17", None, "17"),
        ("#### 17", "18", "18"),
        ("#### 17", 18, "18"),
        ("#### 17", 18.5, "18.5"),
        ("no mark", "steps\n#### 18", "18"),
        ("no mark", r"\boxed{18}", "18"),
        ("no mark", "Friday", "Friday"),
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
    assert choose_task("auto", [record("#### 1"), record(r"\boxed{2}")]).name == "boxed"
    assert choose_task("auto", [record("Good"), record("Bad")]).name == "generic"
    assert choose_task("auto", [record("steps", ground_truth="18")]).name == "boxed"
    assert choose_task("auto", [record("SELECT 1", ground_truth="SELECT 1")]).name == "generic"


def test_auto_refuses_a_mixture_and_names_the_first_stranger():
    records = [record("#### 1", 1), record("Good", 2), record("#### 3", 3)]
    with pytest.raises(UserError, match=r"test\.jsonl:2: .*2 of 3 records look like 'boxed'.*--task generic"):
        choose_task("auto", records)
    assert choose_task("generic", records).name == "generic"


def test_names_and_registry_agree():
    assert set(TASK_NAMES) == {"auto", *all_tasks()}
    with pytest.raises(UserError, match="expected one of auto, generic, boxed, got 'maths'"):
        choose_task("maths", [record("a")])


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("synth_test", "generic"),
        ("spider_test", "generic"),
        ("nq_open_test", "generic"),
        ("rotten_tomatoes_test", "generic"),
        ("gsm8k_test", "boxed"),
    ],
)
def test_the_truth_scores_full_marks_on_real_files_and_another_truth_does_not(shared_data, file, name):
    records = read_records(shared_data / "llm_jepa" / f"{file}.jsonl")
    task = choose_task("auto", records)
    assert task.name == name
    assert all(all(task.score(example, example.answer).scores.values()) for example in records)
    different = [
        (a, b) for a, b in zip(records, records[len(records) // 2 :], strict=False) if task.truth(a) != task.truth(b)
    ]
    assert len(different) > 400
    wrong = [task.score(a, b.answer).scores[task.headline] for a, b in different]
    assert sum(wrong) <= 0.005 * len(wrong)
