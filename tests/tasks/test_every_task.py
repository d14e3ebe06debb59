"""What all tasks promise: they know their records, refuse wrong truths, take their own gold, and convert raw rows."""

import json
import time

import pytest

from stepjepa.data.records import parse_record
from stepjepa.data.sources import read_records
from stepjepa.data.steps import find_steps
from stepjepa.errors import UserError
from stepjepa.files import read_jsonl
from stepjepa.tasks.base import Response, TaskOptions, Unusable
from stepjepa.tasks.boxed import BoxedTask
from stepjepa.tasks.gsm8k import Gsm8kTask
from stepjepa.tasks.hellaswag import LETTERS, HellaswagTask, read_choices
from stepjepa.tasks.nl_rx import NlRxTask, make_record
from stepjepa.tasks.nq_open import NqOpenTask
from stepjepa.tasks.registry import choose_task
from stepjepa.tasks.sentiment import STARS, SentimentTask
from stepjepa.tasks.spider import SpiderTask
from task_records import record

CHOICES = "A man sits.\nA) one\nB) two\nC) three\nD) four"


@pytest.mark.parametrize(
    ("name", "answer", "more"),
    [
        ("gsm8k", "6 * 3 = 18\n#### 18", {}),
        ("gsm8k", "#### 18 \n", {}),
        ("gsm8k", r"\boxed{18}", {"path": "folder/GSM8K_mine.jsonl"}),
        ("gsm8k", "18", {"system": Gsm8kTask.system_prompt}),
        ("boxed", r"\boxed{18}", {}),
        ("boxed", "#### 18\nmore", {}),
        ("boxed", "6 * 3 = 18\n#### 18", {"ground_truth": "18"}),
        ("boxed", "steps", {"ground_truth": "18"}),
        ("generic", "A story.", {"ground_truth": "A tale."}),
        ("generic", "18", {"system": f"{Gsm8kTask.system_prompt} Now."}),
        ("nl-rx", "dog", {"path": "data/synth_test.jsonl"}),
        ("nl-rx", "dog", {"path": "NL-RX-Synth.jsonl"}),
        ("nl-rx", "dog", {"path": "other.jsonl", "system": NlRxTask.system_prompt}),
        ("generic", "dog", {"path": "synthetic_math.jsonl"}),
        ("generic", "dog", {"path": "mysynth.jsonl"}),
        ("sentiment", "Good", {"system": SentimentTask.system_prompt}),
        ("sentiment", "Good", {"path": "/elsewhere/Rotten-Tomatoes.jsonl"}),
        ("generic", "Good", {"path": "yelp/other.jsonl"}),
        ("nq-open", "Amma", {"system": NqOpenTask.system_prompt}),
        ("hellaswag", "A", {"path": "hellaswag_test.jsonl"}),
    ],
)
def test_auto_recognises_prompt_file_name_or_form_of_the_answer(name, answer, more):
    assert choose_task("auto", [record(answer, **more)]).name == name


def test_auto_refuses_a_mixture_and_names_the_first_stranger():
    records = [record(r"\boxed{1}"), record("Good", line=2), record(r"\boxed{3}", line=3)]
    with pytest.raises(UserError, match=r"test\.jsonl:2: .*2 of 3 records look like 'boxed'.*--task generic"):
        choose_task("auto", records)
    assert choose_task("generic", records).name == "generic"


def test_an_option_reaches_the_task_that_takes_it():
    options = TaskOptions(last_number=True)
    assert choose_task("auto", [record("#### 18")], options).options.last_number is True
    with pytest.raises(UserError, match="--last_number does nothing with task 'boxed'"):
        choose_task("boxed", [record("#### 18")], options)


@pytest.mark.parametrize(
    ("task", "answer", "more", "message"),
    [
        (BoxedTask, "no mark", {}, "no answer to compare with.*ground_truth.*--task generic"),
        (BoxedTask, "no mark", {"ground_truth": [18]}, "'ground_truth' is list"),
        (BoxedTask, "no mark", {"ground_truth": "  "}, "'ground_truth' is empty"),
        (Gsm8kTask, "x", {"ground_truth": "Friday"}, "the right answer is 'Friday', no number; .*--task boxed"),
        (SentimentTask, "positive", {}, "'positive', expected Very Bad, Bad.*--task generic"),
        (NqOpenTask, "; ;", {}, "no answer in it"),
        (NlRxTask, "(dog", {}, r"no regular expression of NL-RX \(no '\)' at character 5\); .*--task generic"),
        (HellaswagTask, "B", {"user": "no endings"}, r"no ending 'D\) \.\.\.'"),
        (HellaswagTask, "B", {"user": "c\nA) one\nC) three\nB) two\nD) four"}, r"no ending 'B\) \.\.\.'"),
        (HellaswagTask, "AB", {"user": CHOICES}, "'AB', expected A, B, C or D"),
    ],
)
def test_a_record_without_a_usable_truth_is_refused_with_its_place(task, answer, more, message):
    with pytest.raises(UserError, match=rf"^test\.jsonl:7: .*{message}"):
        task().truth(record(answer, line=7, **more))


@pytest.mark.parametrize(
    ("file", "name", "size"),
    [
        ("gsm8k_test", "gsm8k", 1319),
        ("hellaswag_test", "hellaswag", 1000),
        ("nq_open_test", "nq-open", 1769),
        ("rotten_tomatoes_test", "sentiment", 1066),
        ("yelp_test", "sentiment", 1000),
        ("synth_test", "nl-rx", 2000),
        ("turk_train", "nl-rx", 8000),
    ],
)
def test_gold_is_right_and_the_gold_of_another_record_is_not(shared_data, file, name, size):
    records = read_records(shared_data / "llm_jepa" / f"{file}.jsonl")
    task = choose_task("auto", records)
    assert (task.name, len(records)) == (name, size)
    for scored in task.score_all(records, [Response(each.answer) for each in records]):
        assert scored.error is None
        assert {score for score, value in scored.scores.items() if not value} <= {"undecided"}
    if name == "nl-rx":
        # Other expressions are compared in test_nl_rx.
        return
    half = size // 2
    pairs = zip(records, records[half:] + records[:half], strict=True)
    others = [(each, other.answer) for each, other in pairs if task.truth(each) != task.truth(other)]
    assert len(others) > half
    right = [pair for pair in others if task.score(pair[0], Response(pair[1])).scores[task.headline]]
    # A few questions of NQ-Open have an answer in common, such as a year.
    assert len(right) <= (size // 500 if name == "nq-open" else 0)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        *((NqOpenTask, text) for text in ("a " * 10**5, ";" * 10**5, "A." * 10**5, "1,000" * 10**5)),
        *((NqOpenTask, text) for text in ("-." * 10**5, "1" + "%" * 10**5, " " * 10**5)),
        *((SentimentTask, text) for text in ("Good " * 10**5, "_" * 10**5, "the " * 10**5, " " * 10**5)),
        *((SentimentTask, text) for text in ("very " * 10**5, "it is :" + " " * 10**5)),
        *((HellaswagTask, text) for text in ("A" * 10**5, "answer is " * 10**5, "*" * 10**5, ":\n" * 10**5)),
        *((HellaswagTask, text) for text in ("answer A" + "*" * 10**5, "A\n" * 10**5)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value[:10],
)
def test_long_answers_take_no_longer_than_reading_them(task, text):
    truth = {NqOpenTask: "Amma; 1,000 years", SentimentTask: "Good", HellaswagTask: "A"}[task]
    begin = time.process_time()
    task().score(record(truth, CHOICES), Response(text))
    assert time.process_time() - begin < 2


# Raw rows.

SOLUTION = "She sells 16 - 7 = <<16-7=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"
SOCRATIC = "How many? ** 16 - 7 = <<16-7=9>>9.\nHow much? ** 9 * 2 = $<<9*2=18>>18.\n#### 18"


@pytest.mark.parametrize(
    ("convert", "row", "user", "answer"),
    [
        (Gsm8kTask.convert, {"question": "How much?", "answer": SOLUTION}, "How much?", SOLUTION),
        (
            SpiderTask.convert,
            {"db_id": "singers", "question": "Who?", "query": "SELECT 1\n", "sql": {}},
            "For db_id:[singers]\n\nWho?",
            "SELECT 1",
        ),
        (NqOpenTask.convert, {"question": "q", "answer": "one"}, "q", "one"),
        (NqOpenTask.convert, {"question": "q", "answer": [" one ", "", "one", "two"]}, "q", "one; two"),
        (lambda row: make_record(*row), (" lines with a number\n", "[0-9]\r"), "lines with a number", "[0-9]"),
    ],
)
def test_a_row_becomes_a_record(convert, row, user, answer):
    *_, asked, said = parse_record(convert(row)).messages
    assert (asked["content"], said["content"]) == (user, answer)


@pytest.mark.parametrize(
    ("solution", "options", "expected"),
    [
        (SOCRATIC, {"socratic": False}, "16 - 7 = <<16-7=9>>9.\n9 * 2 = $<<9*2=18>>18.\n#### 18"),
        (SOCRATIC, {"socratic": False, "calculator": False}, "16 - 7 = 9.\n9 * 2 = $18.\n#### 18"),
        (
            SOCRATIC,
            {"calculator": False, "steps": True},
            "How many? ** 16 - 7 = 9.\n\nHow much? ** 9 * 2 = $18.\n#### 18",
        ),
        ("2 << 3 and 4 >> 1\n#### 5", {"calculator": False}, "2 << 3 and 4 >> 1\n#### 5"),
        ("a = 1\r\nb = 2\n\n \n#### 2", {"steps": True}, "a = 1\n\nb = 2\n#### 2"),
    ],
)
def test_questions_annotations_and_steps_of_gsm8k(solution, options, expected):
    converted = Gsm8kTask.convert({"question": "q", "answer": solution}, **options)
    assert converted["messages"][-1]["content"] == expected
    if "steps" in options:
        assert converted["total_steps"] == len(find_steps(expected)) == 2


def test_rows_of_the_hub_give_the_published_files(shared_data):
    folder = shared_data / "llm_jepa"
    rows = [row for _, row in read_jsonl(shared_data / "gsm8k" / "test_socratic.jsonl")]
    published = [value for _, value in read_jsonl(folder / "gsm8k_test.jsonl")]
    assert [Gsm8kTask.convert(row, socratic=False) for row in rows] == published
    for each in read_records(folder / "rotten_tomatoes_test.jsonl")[::50]:
        row = {"text": each.messages[1]["content"], "label": ("Bad", "Good").index(each.answer)}
        assert parse_record(SentimentTask.convert(row)).messages == each.messages
    for each in read_records(folder / "yelp_test.jsonl")[::50]:
        row = {"text": each.messages[1]["content"], "label": str(STARS.index(each.answer))}
        assert parse_record(SentimentTask.convert(row, stars=True)).messages == each.messages
    each = read_records(folder / "nq_open_test.jsonl")[0]
    for answers in (["6 geese a-laying", "maids a-milking"], "['6 geese a-laying', 'maids a-milking']"):
        row = {"question": each.messages[1]["content"], "answer": answers}
        assert parse_record(NqOpenTask.convert(row)).messages == each.messages
    for each in read_records(folder / "hellaswag_test.jsonl")[:50]:
        context, endings = read_choices(each)
        label = LETTERS.index(each.answer)
        for row in (
            {"ctx": context, "endings": list(endings), "label": str(label), "ind": 3},
            {"ctx": context, "endings": json.dumps(endings), "label": label},
            {"ctx_a": context, "ctx_b": "", "endings": endings, "label": label},
        ):
            made = parse_record(HellaswagTask.convert(row))
            assert (made.messages, made.views) == (each.messages, each.views)


STORY = {"ctx": "c", "endings": list("abcd"), "label": "1"}


@pytest.mark.parametrize(
    ("convert", "row", "reason"),
    [
        (Gsm8kTask.convert, {"answer": SOLUTION}, "no field 'question'"),
        (Gsm8kTask.convert, {"question": "q", "answer": "18"}, "'answer' does not end in a line '#### number'"),
        (
            lambda row: Gsm8kTask.convert(row, steps=True),
            {"question": "q", "answer": "a\n#### 1"},
            "fewer than two steps",
        ),
        (NqOpenTask.convert, {"answer": ["a"]}, "no question"),
        (NqOpenTask.convert, {"question": "q", "answer": [None, " "]}, "no answer"),
        (NqOpenTask.convert, {"question": "q", "answer": [1969]}, "an answer that is no text"),
        (SentimentTask.convert, {"text": "", "label": 1}, "no text"),
        (SentimentTask.convert, {"text": "fine", "label": None}, "no label"),
        (SentimentTask.convert, {"text": "fine", "label": "Good"}, "the label is none of 0, 1"),
        (HellaswagTask.convert, {**STORY, "label": -1}, "no label"),
        (HellaswagTask.convert, {**STORY, "ctx": " "}, "no context"),
        (HellaswagTask.convert, {**STORY, "endings": "abcd"}, "not four endings"),
        (HellaswagTask.convert, {**STORY, "label": "2.5"}, "the label is none of 0 to 3"),
        (lambda row: make_record(*row), ("", "a"), "no sentence"),
        (lambda row: make_record(*row), ("a", "(b"), "no regular expression of NL-RX"),
    ],
)
def test_a_row_that_cannot_be_a_record_says_why(convert, row, reason):
    with pytest.raises(Unusable) as caught:
        convert(row)
    assert str(caught.value) == reason
