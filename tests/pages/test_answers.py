"""What of generated answers goes into a page: verdicts, shared texts, nothing that could act on a reader."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from made_up_runs import make_run
from stepjepa.files import write_jsonl
from stepjepa.pages.answers import answers_section, is_right, shown_text
from stepjepa.pages.runs import Run, read_runs


def say(folder: Path, **fields: Any) -> Path:
    """Give the lines of a run's evaluation these fields: a value for each line, or one for all."""
    file = folder / "test.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for place, line in enumerate(lines):
        line |= {name: value[place] if isinstance(value, list) else value for name, value in fields.items()}
    write_jsonl(file, lines)
    return folder


def embedded(runs: list[Run]) -> dict[str, Any]:
    section = answers_section(runs)
    assert section is not None
    value: dict[str, Any] = json.loads(re.search(r'id="answers-data">(.*?)</script>', section.html, re.DOTALL)[1])
    return value


def test_answers_verdicts_and_scores_are_those_of_the_lines(tmp_path):
    folder = make_run(tmp_path / "one", "101", lenient="111", stopped="110")
    say(folder, prompt=["S\nWhat is 3?", "S\nWhat is 5?", "S\nWhat is 7?"], truth="3", generated=["3", "5", "3 3 3"])
    value = embedded(read_runs([folder]))
    (found,) = value["evaluations"]
    assert (found["run"], found["name"], found["headline"]) == ("one", "test", "exact")
    assert found["scores"] == ["exact", "prefix"] and found["begin"] == "S\n"
    # index, prompt, right answer, generated, right, stopped, error, scores
    index, prompt, truth, generated, right, stopped, error, scores = zip(*found["answers"], strict=True)
    assert index == (0, 1, 2) and generated == ("3", "5", "3 3 3")
    assert [value["texts"][place] for place in prompt] == ["What is 3?", "What is 5?", "What is 7?"]
    assert [value["texts"][place] for place in truth] == ["3", "3", "3"] and len(set(truth)) == 1
    assert right == (True, False, True) and stopped == (True, True, False)
    assert error == ("", "wrong answer", "") and scores == ([1, 1], [0, 1], [1, 1])


def test_without_answers_there_is_no_section(tmp_path):
    folder = make_run(tmp_path / "one", "10")
    assert answers_section(read_runs([folder])) is None, "the lines hold no 'generated'"
    (folder / "test.jsonl").unlink()
    assert answers_section(read_runs([folder])) is None
    assert answers_section([]) is None


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!-- <script>", "<img src=x onerror=alert(1)>"]
)
def test_markup_ends_no_element_and_comes_back_as_it_was(tmp_path, text):
    folder = say(make_run(tmp_path / "one", "10"), prompt=text, truth=text, generated=text)
    section = answers_section(read_runs([folder]))
    data = re.search(r'id="answers-data">(.*)</script>', section.html, re.DOTALL)[1]
    assert "<" not in data
    assert json.loads(data)["evaluations"][0]["answers"][0][3] == text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\nb", "a\nb"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_nobody_would_see_is_written_out(text, seen):
    assert shown_text(text) == seen


@pytest.mark.parametrize(
    ("scores", "headline", "right"),
    [
        ({"exact": True}, "exact", True),
        ({"exact": 0.5}, "exact", False),
        ({"exact": 2 / 3}, "exact", True),
        ({"exact": True}, "prefix", None),
        (None, "exact", None),
    ],
)
def test_right_is_more_than_half_by_the_score_that_decides(scores, headline, right):
    assert is_right({"scores": scores}, headline) is right


def test_samples_and_several_right_answers(tmp_path):
    folder = make_run(tmp_path / "one", "11")
    sample = {"generated": "3", "scores": {"exact": True}}
    say(folder, prompt="P", truth=[["3", "three"], []], generated="3", stopped=[2 / 3, 1.0], samples=[[sample] * 3] * 2)
    value = embedded(read_runs([folder]))
    assert value["evaluations"][0]["samples"] == 3
    assert value["texts"][1:] == ["3\nthree", ""]
    assert [answer[5] for answer in value["evaluations"][0]["answers"]] == [False, True]
