"""The fast parser of a line is ``json.loads`` but for repeated keys and the texts of numbers."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepjepa.base.json_object import RepeatedKeyError, parse_data

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=7,
)


@given(VALUES, st.sampled_from(["", " ", "\n\t", "x", "{}"]), st.sampled_from(["", " ", "\r\n", "x", ", 1"]))
@example({"a": 1}, "", "")
def test_a_line_is_read_as_by_json_loads(value: object, before: str, after: str) -> None:
    """The value, or the message and the place of the error."""
    text = f"{before}{json.dumps(value)}{after}"
    try:
        expected = json.loads(text)
    except json.JSONDecodeError as error:
        with pytest.raises(json.JSONDecodeError) as raised:
            parse_data(text)
        assert str(raised.value) == str(error)
    else:
        assert parse_data(text) == expected


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', ' {"b": [{"a": 1, "\\u0061": 1}]} ', '[{"": {"a": 0, "a": 0}}]'])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(RepeatedKeyError, match="the key 'a' twice"):
        parse_data(text)
