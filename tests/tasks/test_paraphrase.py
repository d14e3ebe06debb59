"""Paraphrases: records from pairs and groups, and how alike embeddings are in a group and across groups."""

import itertools

import numpy as np
import pytest

from stepjepa.data.records import parse_record
from stepjepa.errors import UserError
from stepjepa.tasks import paraphrase
from stepjepa.tasks.paraphrase import records_of, within_and_between


def made(*rows):
    """(source, target, group, position) of the records, and what was dropped."""
    wrong = []
    records, dropped = records_of(enumerate(rows, start=1), lambda line, error: wrong.append(f"{line}: {error}"))
    if wrong:
        raise UserError(wrong[0])
    assert all(parse_record(record).messages[0]["role"] == "system" for record in records)
    return [
        (record["messages"][1]["content"], record["messages"][2]["content"], record["group"], record["position"])
        for record in records
    ], dict(dropped)


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


def test_rows_with_a_group_need_not_stand_together():
    rows = [("a", "p"), ("x", "q"), ("b", "p"), ("y", "q"), ("c", "p"), ("alone", "r")]
    expected = [("a", "b", "p", 1), ("b", "c", "p", 2), ("x", "y", "q", 1)]
    for names in (("sentence", "group"), ("text", "group_id"), ("paraphrase", "paraphrase_set_id")):
        records, dropped = made(*(dict(zip(names, row, strict=True)) for row in rows))
        assert (records, dropped) == (expected, {"single sentence": 1})
    pairs = [{"text": "a", "paraphrase": "b", "group": 4}, {"text": "c", "paraphrase": "d", "group": 4}]
    assert made(*pairs)[0] == [("a", "b", 4, 1), ("b", "c", 4, 2), ("c", "d", 4, 3)]
    assert made({"sentence1": "a", "sentence2": "b", "group": "p"})[0] == [("a", "b", "p", 1)]
    numbers = [{"sentence": text, "group": float(number)} for text, number in (("a", 3), ("b", 3))]
    assert made(*numbers)[0] == [("a", "b", 3, 1)]


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (1, None),
        (1.0, None),
        ("true", None),
        ("0", "label 0: no paraphrases"),
        (-1, "no label"),
        (None, "no label"),
        ("entailment", "label neither 0 nor 1"),
    ],
)
def test_only_pairs_labelled_1_are_paraphrases(label, reason):
    records, dropped = made({"sentence1": "one", "sentence2": "two", "label": label})
    assert len(records) == (reason is None)
    assert dropped == ({reason: 1} if reason else {})


def test_what_is_dropped_is_counted():
    records, dropped = made(
        {"set": ["a", "A ", "", None, "b", float("nan")]},
        {"set": ["a", "b"]},
        {"set": ["b", "a"]},
        {"set": ["alone"]},
        {"set": []},
        {"set": ["same", "same"]},
    )
    assert records == [("a", "b", 1, 1), ("b", "a", 3, 1)]
    assert dropped == {
        paraphrase.EMPTY: 3,
        paraphrase.DUPLICATE: 2,
        paraphrase.REPEATED: 1,
        # Nothing else of these two groups is counted.
        paraphrase.SINGLE: 2,
    }


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": "q", "answer": "a"}], "1: the columns are question, answer; expected two sentences"),
        ([{}], r"1: the columns are \(none\)"),
        ([{"set": ["a", "b"]}, {"name": "x", "group": 1}], "2: the columns are name, group"),
        ([{"sentence": "a", "group": 1}, {"sentence": "b", "group": ""}], "2: the columns are sentence, group"),
        ([{"sentence": "a", "group": [1]}], "1: the group is list"),
        ([{"set": "no list"}], "1: 'set' is no list of sentences"),
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


@pytest.mark.parametrize(
    ("embeddings", "groups", "words"),
    [
        (np.ones((3, 2)), [1, 2], r"got shape \(3, 2\) and 2 groups"),
        (np.array([[1.0, 0], [0, 0]]), [1, 1], "row 1"),
        (np.array([[np.nan, 0], [1, 0]]), [1, 1], "row 0"),
    ],
)
def test_similarity_refuses_what_has_no_direction(embeddings, groups, words):
    with pytest.raises(ValueError, match=words):
        within_and_between(embeddings, groups)
