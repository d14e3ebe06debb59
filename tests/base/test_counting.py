"""Numbers of things in messages."""

import pytest

from stepjepa.base.counting import counted


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [
        (0, "record", "0 records"),
        (1, "record", "1 record"),
        (1234, "bad line", "1,234 bad lines"),
        (2, "process", "2 processes"),
    ],
)
def test_things_are_counted(number: int, noun: str, shown: str) -> None:
    assert counted(number, noun) == shown
