"""Two values that should be equal, in a line."""

import pytest

from stepjepa.base.differing_values import describe_difference

LONG = {"spider_path": "/data/" + "x" * 80, "time_limit": 10.0}


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (16, 32, "size is 16, not 32"),
        (None, "a", "size is unknown, not a"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "size: a: b is 1, not 2"),
        (LONG, {**LONG, "time_limit": 5.0}, "size: time_limit is 10.0, not 5.0"),
        ({"a": 1}, {}, "size: a is 1, not unknown"),
        ("y" * 90 + "1\n", "y" * 90 + "2", f"size is ...{'y' * 20}1\\n, not ...{'y' * 20}2"),
        ("z" * 90, "z", f"size is {'z' * 57}..., not z"),
        (["a"], "a", 'size is ["a"], not a'),
    ],
)
def test_what_differs_is_seen(own, other, words):
    assert describe_difference("size", own, other, "{name} is {own}, not {other}") == words
