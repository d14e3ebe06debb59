"""Lists and labels as raw data sets hold them."""

import json

import numpy as np
import pytest

from stepjepa.tasks.raw_values import as_label, as_list


@pytest.mark.parametrize(
    "items",
    [
        ["a", "b"],
        ["a, b", "[c]", "d\\e"],
        ["two\nlines", "tab\t", "é☃"],
        [],
    ],
)
def test_a_list_and_all_ways_of_writing_it(items):
    array = np.array(items, dtype=object)
    # What pandas writes into a CSV file for an array: no commas.
    for value in (items, tuple(items), array, repr(items), json.dumps(items), f" {items} ", str(array)):
        assert as_list(value) == items


@pytest.mark.parametrize(
    "value",
    [None, 3, {"a": 1}, "", "a, b", "['a', 'b'", "['a'b']", "['a', 1]", "[a]"],
)
def test_anything_else_is_none(value):
    assert as_list(value) is None


@pytest.mark.parametrize(
    ("value", "label"),
    [
        *((value, "2") for value in (2, 2.0, " 2 ", "2.00", np.int64(2))),
        *((value, None) for value in (None, " ", -1, "None", float("nan"))),
        (2.5, "2.5"),
        ("v2.0", "v2.0"),
        (True, "True"),
        ("pos", "pos"),
    ],
)
def test_a_label_and_all_ways_of_writing_it(value, label):
    assert as_label(value) == label
