"""Blocks of responses: those that one expression finds, without the time that it takes."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepjepa.preparing.step_splitting import drop_thinking, find_blocks, split_response

SLOW = re.compile(
    r"^[ \t]*(?P<fence>```|~~~).*?^[ \t]*(?P=fence)[ \t]*$"
    r"|^[ \t]*\$\$(?:(?!\$\$).)*\$\$[ \t.,]*$"
    r"|^[ \t]*\\\[(?:(?!\\\]).)*\\\][ \t.,]*$"
    r"|^[ \t]*\\begin\{(?P<name>[a-z]+\*?)\}.*?\\end\{(?P=name)\}[ \t.,]*$",
    re.M | re.S,
)
PIECES = st.lists(
    st.sampled_from(
        [
            *("```", "~~~", "$$", "$", "\\[", "\\]", "\\begin{a}", "\\end{a}", "\\begin{b*}", "\\end{b*}", "\\end{"),
            *("\n", "\n", "\n\n", " ", "\t", ".", ",", "x", "`", "python", "<think>", "</think>"),
        ]
    ),
    max_size=14,
).map("".join)


@given(PIECES)
@example("$$\n$$")
@example("$$$$")
@example("$$$\n$$ .")
@example("```\n```\n```")
@example("```a\n ``` \n\n~~~\n```\n~~~")
@example("\\begin{a}\\end{a}x\n\\end{a}.")
@example("\\[\\[\\]x\n\\]")
@settings(max_examples=1500, deadline=None)
def test_blocks_are_those_of_the_expression(text: str) -> None:
    assert find_blocks(text) == [match.span() for match in SLOW.finditer(text)]


HOSTILE = {
    "thinking that never ends": "<think>" * 100_000,
    "fences that never end": "```a\nb\n" * 100_000,
    "brackets that never end": "\\[\n" * 100_000,
    "brackets behind which something stands": "\\[\n" * 100_000 + "\\] x",
    "environments that never end": "\\begin{a}\n" * 100_000,
    "environments that end otherwise": "\\begin{a}\n" * 50_000 + "\\end{b}\n" * 50_000,
    "formulas": "x\n\n" + "=1\n\n" * 100_000,
    "blanks": "x\n\n" + " " * 500_000 + "# a" + " " * 500_000 + "=",
    "dollars": "x\n\n" + "$ " * 200_000 + "x",
    "blocks and markers": "```\n1. a\n```\n" * 30_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_long_response_takes_no_time_that_grows_with_its_square(name: str) -> None:
    """Each of these took minutes to hours; there is no bound on the time here, only that it ends."""
    text = HOSTILE[name]
    assert isinstance(split_response(drop_thinking(text) or text), list)
