"""Lists, labels and paraphrases as raw data sets hold them."""

import json

import pytest

from stepjepa.base.errors import UserError
from stepjepa.preparing.conversion import CONVERSIONS, convert_rows
from stepjepa.tasks.raw_values import as_label, as_list


@pytest.mark.parametrize("items", [["a", "b"], ["a, b", "[c]", "d\\e"], ["two\nlines", "tab\t", "é☃"]])
def test_a_list_and_all_ways_of_writing_it(items):
    for value in (items, repr(items), json.dumps(items), f" {items} "):
        assert as_list(value) == items


@pytest.mark.parametrize("value", [None, 3, {"a": 1}, "", "a, b", "['a', 'b'", "['a' 'b']", "[a]", "(" * 999])
def test_anything_else_is_none(value):
    assert as_list(value) is None


@pytest.mark.parametrize("value", [2, 2.0, " 2 ", "2.00"])
def test_a_label_and_all_ways_of_writing_it(value):
    assert (as_label(value), as_label("v2.5")) == ("2", "v2.5")


def made(*rows):
    """(source, target, group, position) of the records, and what was dropped."""
    records, counts = convert_rows(enumerate(rows, start=1), CONVERSIONS["paraphrase"].convert, path="raw.tsv")
    assert all(record["messages"][0]["role"] == "system" for record in records)
    return [
        (record["messages"][1]["content"], record["messages"][2]["content"], record["group"], record["position"])
        for record in records
    ], dict(counts.dropped)


@pytest.mark.parametrize(
    "row",
    [
        {"sentence1": "one", "sentence2": "two"},
        {"text": "one", "paraphrases": ["two"], "category": "question", "source": "quora"},
        {"source": "one", "target": "two"},
        {"question1": " one ", "question2": "two\n"},
    ],
)
def test_forms_of_pairs(row):
    assert made(row) == ([("one", "two", 1, 1)], {})


def test_each_sentence_of_a_group_predicts_the_next():
    expected = [("a", "b", 1, 1), ("b", "c", 1, 2), ("c", "d", 1, 3), ("x", "y", 2, 1)]
    assert made({"set": ["a", "b", "c", "d"]}, {"set": ["x", "y"]}) == (expected, {})


def test_only_pairs_labelled_1_are_paraphrases():
    rows = [{"sentence1": "one", "sentence2": "two", "label": label} for label in ("true", 1.0, "0", -1, None)]
    assert made(*rows) == ([("one", "two", place, 1) for place in (1, 2)], {"not labelled 1, as paraphrases": 3})


def test_a_sentence_counts_once_whatever_its_case_and_spacing():
    records, dropped = made({"set": ["a", "A ", "", None, "b", float("nan")]}, {"set": []}, {"set": ["same", "same"]})
    assert records == [("a", "b", 1, 1)]
    assert dropped == {"fewer than two different sentences": 2}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "q", "answer": "a"}, r"^raw\.tsv:1: the columns are question, answer; expected two sentences"),
        ({"set": "no list"}, "'set' is no list of sentences"),
    ],
)
def test_unknown_forms_are_refused_with_the_row(row, words):
    with pytest.raises(UserError, match=words):
        made(row)
