"""JSON objects as dataclasses: each field is what its type says, or an error names file, field and remedy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from stepjepa.base.errors import UserError
from stepjepa.base.typed_json import Origin, at_least, from_json, omitted_if_none, to_json, unknown_fields


@dataclass
class Inner:
    x: Any = None
    text: str | None = omitted_if_none()
    whole: int | None = None
    number: float = 0.0
    number_or_none: float | None = None
    count: int = at_least(0, default=0)
    size: int = at_least(2, default=2)
    switch: bool = False
    choice: Literal["a", "b"] = "a"
    names: list[str] = field(default_factory=list)
    table: dict[str, float] = field(default_factory=dict)
    deeper: Inner | None = None
    rest: dict[str, Any] = unknown_fields()


@dataclass
class Outer:
    inner: Inner
    prefix: str = "none"


ORIGIN = Origin("run.json", "train again", 7)


def test_values_of_every_type() -> None:
    values = {"x": [1], "text": "a", "whole": -3, "number": True, "number_or_none": 2, "count": 0, "choice": "b"}
    values |= {"switch": True, "names": ["a"], "table": {"b": 1}, "deeper": {"number": 0.5}, "new": {"y": 7}}
    inner = from_json(Inner, values, ORIGIN)
    assert (inner.x, inner.text, inner.whole, inner.number, inner.number_or_none) == ([1], "a", -3, 1.0, 2.0)
    assert isinstance(inner.number, float) and isinstance(inner.number_or_none, float)
    assert (inner.count, inner.choice, inner.switch, inner.names, inner.table) == (0, "b", True, ["a"], {"b": 1.0})
    assert inner.deeper == Inner(number=0.5)
    assert inner.rest == {"new": {"y": 7}}
    assert from_json(Inner, to_json(inner), ORIGIN) == inner
    assert to_json(inner)["new"] == {"y": 7}
    written = to_json(Inner())
    assert "text" not in written and written["whole"] is None


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_none_where_none_is_allowed(value: float | None) -> None:
    assert from_json(Inner, {"number_or_none": value}, ORIGIN).number_or_none is None


def test_missing_and_null_are_the_default() -> None:
    assert from_json(Outer, {"inner": {"names": None, "text": None}, "prefix": None}, ORIGIN) == Outer(Inner())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("text", 7, "'inner.text' is '7', expected a text"),
        ("whole", 2.0, "'inner.whole' is '2.0', expected a whole number"),
        ("whole", True, "'inner.whole' is 'True', expected a whole number"),
        ("whole", 10**61, f"'inner.whole' is '1{'0' * 59}...', expected a whole number"),
        ("count", -1, "'inner.count' is '-1', expected a whole number of at least 0"),
        ("size", 1, "'inner.size' is '1', expected a whole number of at least 2"),
        ("number", "7", "'inner.number' is '7', expected a number"),
        ("number", float("nan"), "'inner.number' is 'nan', expected a number"),
        ("number", 1e300, "'inner.number' is '1e+300', expected a number"),
        ("number_or_none", {}, "'inner.number_or_none' is '{}', expected a number"),
        ("switch", 1, "'inner.switch' is '1', expected true or false"),
        ("choice", "c", "'inner.choice' is 'c', expected one of a, b"),
        ("choice", [], "'inner.choice' is '[]', expected one of a, b"),
        ("names", "a", "'inner.names' is 'a', expected a list"),
        ("names", ["a", 3], "'inner.names.1' is '3', expected a text"),
        ("table", [], "'inner.table' is '[]', expected an object"),
        ("table", {"b": "1"}, "'inner.table.b' is '1', expected a number"),
        ("deeper", "\x1b[2J", "'inner.deeper' is '\\x1b[2J', expected an object"),
        ("deeper", {"text": []}, "'inner.deeper.text' is '[]', expected a text"),
    ],
)
def test_a_wrong_field_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_json(Outer, {"inner": {name: value}}, ORIGIN)
    assert str(caught.value) == f"run.json:7: {message}; train again"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(UserError) as caught:
        from_json(Outer, {}, ORIGIN)
    assert str(caught.value) == "run.json:7: 'inner' is missing, expected an object; train again"
    with pytest.raises(UserError, match="'inner' is 'None', expected an object"):
        from_json(Outer, {"inner": None}, ORIGIN)
