"""Rows become records or are counted by reason; every kind of published rows is understood."""

import json
from itertools import count

import pytest

from stepjepa.data.records import bad_records, parse_record
from stepjepa.errors import UserError
from stepjepa.files import read_jsonl
from stepjepa.preparing.conversion import CONVERSIONS, convert_rows
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


def test_several_records_of_a_row_are_a_group_and_bad_rows_are_passed_over():
    good, other = {"text": "a", "paraphrases": ["b", "c"]}, {"name": "d"}
    paraphrase = CONVERSIONS["paraphrase"].convert
    bad = bad_records("skip")
    records, _ = convert_rows(rows(other, good), paraphrase, bad=bad)
    assert [record["group"] for record in records] == [2, 2]
    assert bad.count == 1
    assert len(convert_rows(rows(good), paraphrase, limit=1)[0]) == 1


# A row as the hub has it, and the answer in the record.
SAMPLES = {
    "gsm8k": ({"question": "How many?", "answer": "1+1=2\n#### 2"}, "1+1=2\n#### 2"),
    "spider": (
        {
            "db_id": "store_1",
            "query": "SELECT name FROM playlists;",
            "question": "What are the names of all the playlists?",
            "query_toks": ["SELECT", "name", "FROM", "playlists", ";"],
        },
        "SELECT name FROM playlists;",
    ),
    "nq-open": ({"question": "where is it", "answer": ["Vancouver", "Canada"]}, "Vancouver; Canada"),
    "hellaswag": (
        {"ctx": "A man", "endings": ["sits.", "runs.", "is.", "was."], "label": "1", "activity_label": "Man"},
        "B",
    ),
    "rotten-tomatoes": ({"text": "lovely .", "label": 1}, "Good"),
    "yelp": ({"text": "Lovely.", "label": 4}, "Very Good"),
    "yelp-polarity": ({"text": "Lovely.", "label": 1}, "Good"),
    "paraphrase": ({"sentence1": "It rains.", "sentence2": "Rain falls.", "label": 1}, "Rain falls."),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_kind_takes_rows_of_the_hub(name):
    row, answer = SAMPLES[name]
    records, counts = convert_rows(rows(row, row | dict.fromkeys(row)), CONVERSIONS[name].convert)
    assert [parse_record(record).answer for record in records] == [answer]
    assert (counts.read, counts.dropped.total()) == (2, 1)


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
