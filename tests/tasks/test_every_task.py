"""What all tasks promise: they know their records, refuse wrong truths, take their own gold, and convert raw rows."""

import time

import pytest

from stepjepa.base.errors import UserError
from stepjepa.data.records import parse_record
from stepjepa.data.sources import read_records
from stepjepa.data.steps import find_steps
from stepjepa.tasks.base import Response, TaskOptions
from stepjepa.tasks.generic import BoxedTask, GenericTask, Gsm8kTask
from stepjepa.tasks.hellaswag import HellaswagTask
from stepjepa.tasks.nl_rx import NlRxTask
from stepjepa.tasks.nq_open import NqOpenTask
from stepjepa.tasks.raw_values import Unusable
from stepjepa.tasks.registry import choose_records, choose_task
from stepjepa.tasks.sentiment import SentimentTask
from task_records import record

CHOICES = "A man sits.\nA) one\nB) two\nC) three\nD) four"


def test_an_answer_without_text_is_left_out():
    """A tool call is no text to be compared."""
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    remaining, left_out = choose_records(GenericTask(), [record("a"), parse_record({"messages": messages})])
    assert list(remaining) == [0] and left_out == {"answer without text (a tool call)": 1}


@pytest.mark.parametrize(
    ("name", "answer", "more"),
    [
        ("gsm8k", "6 * 3 = 18\n#### 18", {}),
        ("gsm8k", "18", {"system": Gsm8kTask.system_prompt}),
        ("boxed", r"\boxed{18}", {}),
        ("boxed", "6 * 3 = 18\n#### 18", {"ground_truth": "18"}),
        ("generic", "18", {"system": f"{Gsm8kTask.system_prompt} Now."}),
        ("nl-rx", "dog", {"path": "data/synth_test.jsonl"}),
        ("generic", "dog", {"path": "synthetic_math.jsonl"}),
        ("sentiment", "Good", {"path": "/elsewhere/Rotten-Tomatoes.jsonl"}),
        ("nq-open", "Amma", {"system": NqOpenTask.system_prompt}),
    ],
)
def test_auto_recognises_prompt_file_name_or_form_of_the_answer(name, answer, more):
    assert choose_task("auto", [record(answer, **more)]).name == name


def test_auto_refuses_a_mixture_and_names_the_first_stranger():
    records = [record(r"\boxed{1}"), record("Good", line=2), record(r"\boxed{3}", line=3)]
    with pytest.raises(UserError, match=r"test\.jsonl:2: .*2 of 3 records look like 'boxed'.*`task generic`"):
        choose_task("auto", records)


def test_an_option_reaches_the_task_that_takes_it():
    options = TaskOptions(time_limit=3.0)
    assert choose_task("nl-rx", [record("dog")], options).options.time_limit == 3.0
    with pytest.raises(UserError, match="`time_limit` does nothing with task 'boxed'"):
        choose_task("boxed", [record("#### 18")], options)


@pytest.mark.parametrize(
    ("task", "answer", "more", "message"),
    [
        (BoxedTask, "no mark", {}, "no answer to compare with.*ground_truth.*`task generic`"),
        (BoxedTask, "no mark", {"ground_truth": [18]}, r"'ground_truth' is \[18\]"),
        (Gsm8kTask, "x", {"ground_truth": "Friday"}, "the right answer is 'Friday', no number; .*`task boxed`"),
        (SentimentTask, "positive", {}, "'positive', expected Very Bad, Bad.*`task generic`"),
        (NqOpenTask, "; ;", {}, "no answer in it"),
        (NlRxTask, "(dog", {}, r"no regular expression of NL-RX \(no '\)' at character 5\); .*`task generic`"),
        (HellaswagTask, "B", {"user": "no endings"}, "four endings on lines that begin"),
        (HellaswagTask, "AB", {"user": CHOICES}, "'AB', expected A, B, C or D"),
    ],
)
def test_a_record_without_a_usable_truth_is_refused_with_its_place(task, answer, more, message):
    with pytest.raises(UserError, match=rf"^test\.jsonl:7: .*{message}"):
        task().truth(record(answer, line=7, **more))


@pytest.mark.sample(1)
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
    ("task", "answer"),
    [
        (BoxedTask, r"\boxed{18}"),
        (Gsm8kTask, "#### 18"),
        (GenericTask, "Amma"),
        (NlRxTask, "(dog)+"),
        (NqOpenTask, "Amma; mother"),
        (SentimentTask, "Good"),
        (HellaswagTask, "B"),
    ],
)
@pytest.mark.parametrize("thought", ["<think>\nA dog; #### 5, so (.\n</think>\n\n", "[THINK]Bad[/THINK]"])
def test_a_thought_in_front_of_the_truth_is_no_part_of_it(task, answer, thought):
    """As in records of a reasoning model, of which some are held out for the test."""
    made, reasoned = task(), record(thought + answer, CHOICES)
    assert made.truth(reasoned) == made.truth(record(answer, CHOICES))
    scored = made.score_all([reasoned] * 2, [Response(answer), Response(thought + answer)])
    made.close()
    assert [each.error for each in scored] == [None, None]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("task", "text"),
    [
        *((NqOpenTask, text * 10**5) for text in (";", "1,000", "%1", "a ", "\u0301")),
        *((SentimentTask, text * 10**5) for text in ("_", "very ", "it is : ")),
        *((HellaswagTask, text * 10**5) for text in ("answer is ", "answer A*", "A) ")),
    ],
    ids=lambda value: value[:10] if isinstance(value, str) else value.__name__,
)
def test_long_answers_take_no_longer_than_reading_them(task, text):
    truth = {NqOpenTask: "Amma; 1,000 years", SentimentTask: "Good", HellaswagTask: "A"}[task]
    begin = time.process_time()
    task().score(record(truth, CHOICES), Response(text))
    assert time.process_time() - begin < 4


# Raw rows.

SOCRATIC = "How many? ** 16 - 7 = <<16-7=9>>9.\nHow much? ** 9 * 2 = $<<9*2=18>>18.\n#### 18"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"socratic": False, "calculator": False}, "16 - 7 = 9.\n9 * 2 = $18.\n#### 18"),
        ({"calculator": False, "steps": True}, "How many? ** 16 - 7 = 9.\n\nHow much? ** 9 * 2 = $18.\n#### 18"),
    ],
)
def test_questions_annotations_and_steps_of_gsm8k(options, expected):
    converted = Gsm8kTask.convert({"question": "q", "answer": SOCRATIC}, **options)
    assert converted["messages"][-1]["content"] == expected
    if "steps" in options:
        assert converted["total_steps"] == len(find_steps(expected)) == 2


STORY = {"ctx": "c", "endings": list("abcd"), "label": "1"}


@pytest.mark.parametrize(
    ("convert", "row", "reason"),
    [
        (Gsm8kTask.convert, {"answer": SOCRATIC}, "no text in 'question'"),
        (Gsm8kTask.convert, {"question": "q", "answer": "18"}, "'answer' does not end in a line '#### number'"),
        (SentimentTask.convert, {"text": "fine", "label": "Good"}, "the label is none of 0 to 1"),
        (HellaswagTask.convert, {**STORY, "endings": "abcd"}, "not four endings"),
    ],
)
def test_a_row_that_cannot_be_a_record_says_why(convert, row, reason):
    with pytest.raises(Unusable) as caught:
        convert(row)
    assert str(caught.value) == reason
