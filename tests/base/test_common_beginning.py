"""How far two sequences are equal."""

from collections.abc import Sequence

import pytest

from stepjepa.base.common_beginning import common_length


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [
        ("abc", "abd", 2),
        ("abc", "xbc", 0),
        ("abc", "ab", 2),
        ("", "ab", 0),
        ("abc", "abc", 3),
        ([1, 2, 3], (1, 2, 4, 5), 2),
    ],
)
def test_sequences_are_equal_up_to_there(first: Sequence[object], second: Sequence[object], length: int) -> None:
    assert common_length(first, second) == common_length(second, first) == length
