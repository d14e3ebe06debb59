"""Fields of JSON files: each taken as what it must be, or an error with file, field and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from stepjepa.base.errors import UserError
from stepjepa.fields import Fields


def fields(**values: Any) -> Fields:
    return Fields(values, "run.json", "train again", 7)


def test_what_is_taken() -> None:
    found = fields(text="a", zero=0, whole=-3, number=0.5, yes=True, none=None, nan=float("nan"), inner={"a": 1})
    assert (found.text("text"), found.text_or_none("none"), found.text_or_none("absent")) == ("a", None, None)
    assert (found.whole("whole"), found.whole("zero", 0), found.whole_or_none("none")) == (-3, 0, None)
    assert (found.number("number"), found.number("whole"), found.number("yes")) == (0.5, -3.0, 1.0)
    assert [found.number_or_none(name) for name in ("number", "none", "nan", "absent")] == [0.5, None, None, None]
    assert found.inner("inner").whole("a") == 1
    assert found.inner_or_none("none") is found.inner_or_none("absent") is None
    assert (list(fields(a=1, b=2)), "a" in fields(a=1)) == (["a", "b"], True)


@pytest.mark.parametrize(
    ("method", "value", "told"),
    [
        ("text", 7, "'x' is '7', expected a text"),
        ("whole", 2.0, "'x' is '2.0', expected a whole number"),
        ("whole", True, "'x' is 'True', expected a whole number"),
        ("whole", 10**61, f"'x' is '1{'0' * 59}...', expected a whole number"),
        ("number", "7", "'x' is '7', expected a number"),
        ("number", float("nan"), "'x' is 'nan', expected a number"),
        ("number", 1e300, "'x' is '1e+300', expected a number"),
        ("number_or_none", {}, "'x' is '{}', expected a number"),
        ("inner_or_none", "\x1b[2J", "'x' is '\\x1b[2J', expected an object"),
    ],
)
def test_what_is_refused(method: str, value: Any, told: str) -> None:
    with pytest.raises(UserError) as caught:
        getattr(fields(inner={"x": value}).inner("inner"), method)("x")
    assert str(caught.value) == f"run.json:7: {told}; train again".replace("'x'", "'inner.x'")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(UserError, match=r"'prefix' is missing, expected an object"):
        fields().inner("prefix")
