"""Where steps begin and end in a text."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepjepa.data.steps import Step, find_steps, separator_pattern


def pieces(text: str, separator: str = "blank") -> list[str]:
    return [text[step.start : step.end] for step in find_steps(text, separator)]


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("one\n\ntwo\n\nthree", "blank", ["one\n\n", "two\n\n", "three"]),
        ("one\ntwo\n\nthree", "blank", ["one\ntwo\n\n", "three"]),
        ("one\ntwo\n\nthree", "line", ["one\n", "two\n\n", "three"]),
        ("one\n\n\n\ntwo", "blank", ["one\n\n\n\n", "two"]),
        ("one \n \t\n two", "blank", ["one \n \t\n", " two"]),
        ("one\r\n\r\ntwo\r\n", "blank", ["one\r\n\r\n", "two\r\n"]),
        ("\n\none\n\ntwo", "blank", ["\n\none\n\n", "two"]),
        ("one\n\n", "blank", ["one\n\n"]),
        ("one\n\n  \n\n\t", "blank", ["one\n\n  \n\n\t"]),
        ("one", "blank", ["one"]),
        ("", "blank", []),
        (" \n\n \n", "blank", []),
        ("one##two####three", "##", ["one##", "two####", "three"]),
        ("a.b", ".", ["a.", "b"]),
        ("one## ##two", "##", ["one## ##", "two"]),
        ("one\n\n\u00a0\n\ntwo", "blank", ["one\n\n\u00a0\n\n", "two"]),
        ("one<step>two", "<step>", ["one<step>", "two"]),
    ],
)
def test_steps_by_hand(text: str, separator: str, expected: list[str]) -> None:
    assert pieces(text, separator) == expected


def test_an_empty_separator_is_refused() -> None:
    with pytest.raises(ValueError, match="non-empty string"):
        separator_pattern("")


def trying_each_start(text: str, separator: str) -> list[Step]:
    """As ``find_steps``, with expressions that try every blank as the first of a separator."""
    pattern = re.compile({"blank": r"(?:[ \t]*\r?\n){2,}", "line": r"(?:[ \t]*\r?\n)+"}.get(separator, "(?:#a)+"))
    cuts = [(0, 0), *(match.span() for match in pattern.finditer(text)), (len(text), len(text))]
    steps: list[Step] = []
    for (_, begin), (end, after) in itertools.pairwise(cuts):
        if text[begin:end].strip():
            steps.append(Step(steps[-1].end if steps else 0, after))
        elif steps:
            steps[-1] = steps[-1]._replace(end=after)
    return steps


@given(st.text(alphabet=" \t\r\n\x0b\u2003x#a", max_size=40), st.sampled_from(["blank", "line", "#a"]))
@settings(max_examples=400, deadline=None)
def test_steps_equal_those_found_by_trying_each_start(text: str, separator: str) -> None:
    assert find_steps(text, separator) == trying_each_start(text, separator)


@pytest.mark.parametrize("separator", ["blank", "line"])
def test_a_long_run_of_blanks_is_gone_through_once(separator: str) -> None:
    """A million of them took hours, each being tried as the first of a separator."""
    text = "one" + " \t" * 500_000 + "two\n\nthree"
    assert pieces(text, separator) == [text[:-5], "three"]


def test_a_separator_at_the_very_start_is_no_step() -> None:
    assert pieces("## ##one##two", "##") == ["## ##one##", "two"]
    assert pieces("## ", "##") == []
