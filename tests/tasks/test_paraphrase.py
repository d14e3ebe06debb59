"""Paraphrases: records of rows, and how alike embeddings are in a group and across groups."""

import itertools

import numpy as np
import pytest

from stepjepa.analysis.numbers import within_and_between
from stepjepa.errors import UserError
from stepjepa.preparing.conversion import CONVERSIONS, convert_rows


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
        {"id": 7, "sentence1": "one", "sentence2": "two", "label": 1},
        {"text": "one", "paraphrases": ["two"], "category": "question", "source": "quora"},
        {"text": "one", "paraphrases": "['two']"},
        {"source": "one", "target": "two"},
        {"sentence_1": " one ", "sentence_2": "two\n"},
    ],
)
def test_forms_of_pairs(row):
    assert made(row) == ([("one", "two", 1, 1)], {})


def test_each_sentence_of_a_group_predicts_the_next():
    expected = [("a", "b", 1, 1), ("b", "c", 1, 2), ("c", "d", 1, 3), ("x", "y", 2, 1)]
    assert made({"set": ["a", "b", "c", "d"]}, {"set": ["x", "y"]}) == (expected, {})
    assert made({"text1": "a", "text2": "b", "text10": "d", "text3": "c"}, {"text1": "x", "text2": "y"})[0] == expected
    assert made({"text": "a", "paraphrases": ["b", "c", "d"]}, {"text": "x", "paraphrases": ["y"]})[0] == expected


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (1, None),
        ("true", None),
        ("0", "label 0: no paraphrases"),
        (-1, "no label"),
        ("entailment", "label neither 0 nor 1"),
    ],
)
def test_only_pairs_labelled_1_are_paraphrases(label, reason):
    records, dropped = made({"sentence1": "one", "sentence2": "two", "label": label})
    assert len(records) == (reason is None)
    assert dropped == ({reason: 1} if reason else {})


def test_a_sentence_counts_once_whatever_its_case_and_spacing():
    records, dropped = made(
        {"set": ["a", "A ", "", None, "b", float("nan")]}, {"set": ["alone"]}, {"set": []}, {"set": ["same", "same"]}
    )
    assert records == [("a", "b", 1, 1)]
    assert dropped == {"fewer than two different sentences": 3}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": "q", "answer": "a"}], r"^raw\.tsv:1: the columns are question, answer; expected two sentences"),
        ([{}], r"the columns are \(none\)"),
        ([{"set": ["a", "b"]}, {"name": "x"}], r"^raw\.tsv:2: the columns are name"),
        ([{"set": "no list"}], "'set' is no list of sentences"),
    ],
)
def test_unknown_forms_are_refused_with_the_row(rows, words):
    with pytest.raises(UserError, match=words):
        made(*rows)


@pytest.mark.parametrize(("size", "width", "count"), [(2, 3, 1), (7, 5, 3), (61, 17, 11), (61, 4, 61)])
def test_similarity_in_and_between_groups_against_the_double_loop(size, width, count):
    random = np.random.default_rng(size)
    embeddings = random.normal(size=(size, width)) + 0.3
    groups = [f"group {number}" for number in random.permutation(size) % count]
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosines = {"within": [], "between": []}
    for one, other in itertools.combinations(range(size), 2):
        cosines["within" if groups[one] == groups[other] else "between"].append(units[one] @ units[other])
    found = within_and_between(embeddings, groups)
    assert found["groups"] == count
    for name, values in cosines.items():
        assert found[f"{name}_pairs"] == len(values)
        assert found[name] == (pytest.approx(np.mean(values), abs=1e-12) if values else None)
