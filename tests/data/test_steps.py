"""Where steps begin and end in a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepjepa.data.steps import Step, find_steps, separator_pattern


def pieces(text: str, separator: str = "blank") -> list[str]:
    return [text[step.start : step.end] for step in find_steps(text, separator)]


def slow_steps(text: str, *, blank: bool) -> list[str]:
    """Line by line: a step ends where a line with text follows an empty one (or, with lines as steps, any line)."""
    result: list[str] = []
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    closed = False
    for line in lines:
        empty = not line.strip()
        if not result or (closed and not empty and result[-1].strip()):
            result.append(line)
            closed = False
        else:
            result[-1] += line
        if empty or not blank:
            closed = True
    return [step for step in result if step.strip()]


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


def test_content_ends_before_the_separator() -> None:
    assert find_steps("ab.\n\ncd") == [Step(0, 3, 5), Step(5, 7, 7)]
    assert find_steps("ab \n\n") == [Step(0, 2, 5)]


@pytest.mark.parametrize("separator", ["blank", "line"])
def test_steps_of_real_text(separator: str, shared_data: Path) -> None:
    traces = json.loads((shared_data / "traces" / "star_repo_star.detailed_results.json").read_text(encoding="utf-8"))
    texts = [trace["full_response"] for trace in traces if trace["full_response"].strip()]
    with (shared_data / "llm_jepa" / "gsm8k_train.jsonl").open(encoding="utf-8") as file:
        texts += [json.loads(next(file))["messages"][-1]["content"] for _ in range(500)]
    several = 0
    for text in texts:
        found = pieces(text, separator)
        assert "".join(found) == text, "steps leave a gap"
        assert all(step.strip() for step in found)
        assert found == slow_steps(text, blank=separator == "blank")
        several += len(found) > 1
    assert several > len(texts) / 2


def test_an_empty_separator_is_refused() -> None:
    with pytest.raises(ValueError, match="non-empty string"):
        separator_pattern("")
