"""Rows and responses become records or are counted by reason; every kind of published rows is understood."""

import json
import math
from decimal import Decimal
from functools import partial
from itertools import count

import pytest

from stepjepa.base.errors import UserError
from stepjepa.base.files import read_jsonl
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.records import parse_record
from stepjepa.data.steps import find_steps
from stepjepa.preparing.conversion import (
    CONVERSIONS,
    SYSTEM_PROMPT,
    StepOptions,
    convert_chat,
    convert_response,
    convert_rows,
)
from stepjepa.tasks.hellaswag import read_choices
from stepjepa.tasks.raw_values import Unusable, chat_record


def convert(row):
    if "answer" not in row:
        raise Unusable("no answer")
    return chat_record("s", row["question"], row["answer"])


def rows(*values):
    return enumerate(values, start=1)


def test_rows_are_converted_or_counted():
    given = [{"question": "a", "answer": "1"}, {"question": "b"}, {"question": "c", "answer": "3"}, {}]
    records, counts = convert_rows(rows(*given), convert)
    assert [record["messages"][-1]["content"] for record in records] == ["1", "3"]
    assert (counts.read, counts.dropped, counts.columns) == (4, {"no answer": 2}, ("question", "answer"))


def test_nothing_behind_the_last_record_is_read():
    endless = ((number, {"question": "q", "answer": "a"} if number % 2 else {}) for number in count(1))
    records, counts = convert_rows(endless, convert, limit=3)
    assert len(records) == 3
    assert (counts.read, counts.dropped.total()) == (5, 2)


def test_what_is_no_record_is_an_error_with_its_place():
    with pytest.raises(UserError, match=r"^raw\.csv:2: messages\[2\]\.content \(assistant\) is empty"):
        convert_rows(rows({"question": "a", "answer": "1"}, {"question": "a", "answer": " "}), convert, path="raw.csv")


def test_a_converted_chat_is_trained_and_judged_as_its_row():
    """Views, ground truth and id were left out, so that a divided file trained other pairs than the whole one."""
    beside = {"id": "a-7", "views": [["q", "t"]], "ground_truth": "14", "group": 3}
    chats = [chat_record("s", "q", "a"), {"question": "q", "answer": "a"}]
    pair = {"text": "lines with a digit", "code": ".*[0-9].*"}
    given = [chat | fields | {"source": "web"} for chat in chats for fields in (beside, pair)]
    records, counts = convert_rows(rows(*given), convert_chat)
    assert counts.unused == ["source"]
    for row, made in zip(given, records, strict=True):
        before, after = parse_record(row), parse_record(made)
        assert (before.messages, before.views) == (after.messages, after.views) and after.views is not None
        assert after.extra == {name: value for name, value in before.extra.items() if name != "source"}
    # A column of the chat is no view beside it.
    (record,), _ = convert_rows(rows(pair), partial(convert_chat, columns=("text", "code")))
    assert record.keys() == {"messages"}


def test_several_records_of_a_row_are_a_group_and_bad_rows_are_passed_over():
    good, other = {"text": "a", "paraphrases": ["b", "c"]}, {"name": "d"}
    paraphrase = CONVERSIONS["paraphrase"].convert
    bad = BadRecords("skip")
    records, _ = convert_rows(rows(other, good), paraphrase, bad=bad)
    assert [record["group"] for record in records] == [2, 2]
    assert bad.count == 1
    assert len(convert_rows(rows(good), paraphrase, limit=1)[0]) == 1


def raw_row(name, record):
    """The row that a published record was made of."""
    user, answer = (message["content"] for message in record["messages"][-2:])
    if name == "spider":
        head, _, question = user.partition("\n\n")
        return {"db_id": head.removeprefix("For db_id:[").removesuffix("]"), "question": question, "query": answer}
    if name == "nq-open":
        return {"question": user, "answer": str(answer.split("; "))}
    if name == "hellaswag":
        context, endings = read_choices(parse_record(record))
        return {"ctx": context, "endings": json.dumps(endings), "label": "ABCD".index(answer)}
    labels = {"rotten-tomatoes": ["Bad", "Good"], "yelp": ["Very Bad", "Bad", "Mediocre", "Good", "Very Good"]}
    return {"text": user, "label": labels[name].index(answer)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("spider", "spider_test"),
        ("nq-open", "nq_open_test"),
        ("hellaswag", "hellaswag_test"),
        ("rotten-tomatoes", "rotten_tomatoes_test"),
        ("yelp", "yelp_test"),
    ],
)
def test_records_are_those_of_the_published_files(shared_data, name, file):
    published = [value for _, value in read_jsonl(shared_data / "llm_jepa" / f"{file}.jsonl")]
    given = rows(*(raw_row(name, record) for record in published))
    records, counts = convert_rows(given, CONVERSIONS[name].convert)
    assert counts.dropped.total() == 0
    assert records == published


def test_socratic_rows_give_the_published_records(shared_data):
    given = read_jsonl(shared_data / "gsm8k" / "test_socratic.jsonl")
    published = [value for _, value in read_jsonl(shared_data / "llm_jepa" / "gsm8k_test.jsonl")]
    assert convert_rows(given, lambda row: CONVERSIONS["gsm8k"].convert(row, socratic=False))[0] == published


RESPONSE = "<think>Hm.\n\nWell.</think>\n\nShe has 3 + 4 = 7.\n\nShe eats 2, so \\boxed{5}."


def raw(**changes):
    value = {"question": "How many?", "answer": "3+4=7\n#### 5", "ground_truth": "5", "deepseek_response": RESPONSE}
    value.update(changes)
    return {name: field for name, field in value.items() if field is not None}


def prepare(*values, **options):
    return convert_rows(rows(*values), partial(convert_response, options=StepOptions(**options)), path="raw.jsonl")


def test_a_record():
    (record,), counts = prepare(raw())
    assert record == {
        "question": "How many?",
        "answer": "3+4=7\n#### 5",
        "ground_truth": "5",
        "total_steps": 2,
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "She has 3 + 4 = 7.\n\nShe eats 2, so \\boxed{5}."},
        ],
    }
    assert (counts.read, counts.dropped.total()) == (1, 0)


@pytest.mark.parametrize(
    ("response", "changed"),
    [
        ("3 + 4 = 7.\n\nSo 7 + 1 = 8.", 0),
        ("\n3 + 4 = 7.\r\n\r\nSo 7 + 1 = 8.\n\n", 0),
        ("3 + 4 = 7.\n\n```\ny = 1\n\nreturn y\n```\n\nSo 7 + 1 = 8.", 1),
        ("2 + 3 = 5 apples.\n\n5 * 4 = 20 apples.\n\n20", 1),
        ("3 + 4 = 7.\n\n---\n\nSo 7 + 1 = 8.", 1),
        (["3 + 4 = 7.\n\nSo far.", "So 7 + 1 = 8."], 1),
        (["3 + 4 = 7.", "So 7 + 1 = 8."], 0),
    ],
)
def test_removed_blank_lines_are_counted(response, changed):
    """A block of code lost them without a word."""
    records, counts = prepare(raw(deepseek_response=response), raw())
    assert len(records) == 2 and counts.changed.total() == changed


def test_a_gap_of_a_table_is_left_out_of_the_record():
    (record,), _ = prepare(raw(answer=math.nan))
    assert "answer" not in record


@pytest.mark.parametrize(
    ("answer", "ground_truth", "expected"),
    [
        ("3+4=7\n#### 1,005", None, "1,005"),
        ("#### 7", "5", "5"),
        ("#### 7", " ", "7"),
        (None, "3 + 2\n#### 5", "5"),
        (5, math.nan, "5"),
        (None, 0, "0"),
    ],
)
def test_ground_truth(answer, ground_truth, expected):
    (record,), _ = prepare(raw(answer=answer, ground_truth=ground_truth))
    assert record["ground_truth"] == expected


STEPS = ["She has\n\n7.", "She eats 2.", "It is \\boxed{5}."]


@pytest.mark.parametrize("response", [STEPS, json.dumps(STEPS), repr(STEPS)], ids=["list", "JSON", "Python"])
def test_a_list_of_texts_is_the_steps(response):
    (record,), _ = prepare(raw(steps=response), response_field="steps", require_correct=True)
    assert record["messages"][2]["content"] == "She has\n7.\n\nShe eats 2.\n\nIt is \\boxed{5}."
    assert record["total_steps"] == 3


@pytest.mark.parametrize("response", [[], [1, 2], [{"text": "a"}], "[unclosed"])
def test_other_lists_are_no_steps(response):
    records, counts = prepare(raw(), raw(deepseek_response=response))
    assert (len(records), counts.dropped.total()) == (1, 1)


def test_the_id_of_a_response_stays():
    (record,), counts = prepare(raw(id=7, source="x"))
    assert record["id"] == 7
    assert counts.unused == ["source"]


def test_a_chat_needs_no_search_for_steps():
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    with pytest.raises(UserError, match=r"raw.jsonl:1: 'messages' is a chat, and no field 'question' .* finds steps"):
        prepare(chat)
    assert len(prepare(raw(**chat))[0]) == 1


def test_what_json_has_no_form_for_becomes_text():
    (record,), _ = prepare(raw(answer=Decimal("5.10"), ground_truth="5.1"))
    assert record["answer"] == "5.10"
    ((chat,), _) = convert_rows(rows({"question": "q", "answer": "a", "id": Decimal("5.10"), "group": 3}), convert_chat)
    assert (chat["id"], chat["group"]) == ("5.10", 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"deepseek_response": None}, "no text in 'deepseek_response'"),
        ({"question": 5}, "no text in 'question'"),
        ({"deepseek_response": "<think>never ends"}, "'deepseek_response' holds only thinking"),
        (
            {"deepseek_response": ["It is 5:\n```", "```\nThe end is 6."]},
            "a code fence or formula begins in one step and ends in another",
        ),
        ({"deepseek_response": "It is \\boxed{5}."}, "fewer than two steps"),
        ({"deepseek_response": "<think>a\n\nb</think>It is 5."}, "fewer than two steps behind the thought"),
        ({"deepseek_response": ["It is 5."]}, "fewer than two steps"),
    ],
)
def test_what_is_skipped_and_why(changes, reason):
    records, counts = prepare(raw(), raw(**changes), raw())
    assert len(records) == 2
    assert counts.dropped == {reason: 1}
    assert counts.read == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"deepseek_response": "It was 7.\n\nNow it is\n#### $5.00"}, None),
        ({"ground_truth": None}, None),
        ({"deepseek_response": "It may be \\boxed{5}.\n\nNo, it is \\boxed{6}."}, "wrong or no final answer"),
        ({"deepseek_response": "It was 7.\n\nNow it is 5."}, "wrong or no final answer"),
        ({"ground_truth": None, "answer": None}, "no ground truth to compare with"),
    ],
)
def test_require_correct(changes, reason):
    _, counts = prepare(raw(**changes), require_correct=True)
    assert counts.dropped == ({} if reason is None else {reason: 1})
    assert len(prepare(raw(**changes))[0]) == 1


def test_a_splitter_of_ones_own():
    observed = []

    def split(response):
        observed.append(response)
        return ["She has\n\n7.", " ", "She keeps 5.\n"]

    (record,), _ = prepare(raw(), splitter=split)
    assert observed == ["She has 3 + 4 = 7.\n\nShe eats 2, so \\boxed{5}."]
    assert record["messages"][2]["content"] == "She has\n7.\n\nShe keeps 5."
    assert record["total_steps"] == 2


@pytest.mark.parametrize(("result", "got"), [("a", "str"), (None, "NoneType"), (["a", 1], "list")])
def test_what_a_splitter_gives_is_checked(result, got):
    with pytest.raises(UserError, match=rf"raw.jsonl:1: custom: the splitter gave {got}, expected a list"):
        prepare(raw(), splitter=lambda response: result)


def test_real_traces_become_records(shared_data):
    path = shared_data / "traces" / "star_repo_star.detailed_results.json"
    traces = [value | {"ground_truth": value["correct_answer"]} for value in json.loads(path.read_text("utf-8"))]
    records, counts = prepare(*traces, response_field="full_response")
    assert (counts.read, len(records) > 0.95 * len(traces)) == (len(traces), True)
    for record in records:
        assert len(find_steps(parse_record(record).answer, "blank")) == record["total_steps"] >= 2
