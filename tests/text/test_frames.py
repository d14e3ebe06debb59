"""Chats written around their contents without running a template."""

from __future__ import annotations

import pytest

from stepjepa.text.frames import Frame, Rendered

# <u>..</u>\n<a>..</a>, the assistant's content trimmed, one character behind each turn that is not part of it.
FRAME = Frame("<u>", ((None, "</u>\n<a>", 8, 4), (str.strip, "</a>\n", 5, 4)))


def test_by_hand() -> None:
    assert FRAME.fill([" why\n", "so"]) == Rendered("<u> why\n</u>\n<a>so</a>\n", ((3, 8), (16, 18)), (12, 22))


@pytest.mark.parametrize("contents", [["why", " so"], ["why", ""], [" \n", "so"]])
def test_what_would_be_trimmed_or_is_blank_is_left_to_the_template(contents: list[str]) -> None:
    assert FRAME.fill(contents) is None
