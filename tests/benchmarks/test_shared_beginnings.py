"""The records of the benchmarks of shared beginnings, and the table and pictures of their results."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.base.files import write_json

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the folder of benchmarks."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


QUESTIONS = [
    tiny.make_record("Answer.", f"How much is {n}?", f"He needs {n} each.\nShe earned 2 more.\nIn total {n}.\n#### {n}")
    for n in range(7)
]


def test_each_question_has_as_many_different_answers(load: Any) -> None:
    made = load("shared_beginnings")
    for answers in (1, 3, 4):
        rows = made.with_answers(QUESTIONS, 12, answers)
        # There are seven questions.
        assert len(rows) == min(12, 7 * answers) == len({(row[1]["content"], row[2]["content"]) for row in rows})
        assert set(Counter(row[1]["content"] for row in rows).values()) == {answers}
        for row in rows:
            number = row[1]["content"].split()[-1].rstrip("?")
            assert row[2]["content"].splitlines()[-1] == f"#### {number}"
    assert made.with_answers(QUESTIONS, 12, 3) == made.with_answers(QUESTIONS, 12, 3)


def test_all_records_begin_with_so_many_tokens(load: Any, trained_tokenizer: Any) -> None:
    made = load("shared_beginnings")
    text = "What is 3+4+5? " * 20
    rows = made.with_prefix(QUESTIONS[:3], text, 41, trained_tokenizer)
    first = {row[0]["content"] for row in rows}
    assert len(first) == 1
    prefix = first.pop().partition("\n")[2]
    assert (
        trained_tokenizer(prefix, add_special_tokens=False)["input_ids"]
        == (trained_tokenizer(text, add_special_tokens=False)["input_ids"][:41])
    )
    assert [row[1]["content"] for row in rows] == [each.messages[1]["content"] for each in QUESTIONS[:3]]
    with pytest.raises(ValueError, match="text: expected at least 41 tokens"):
        made.with_prefix(QUESTIONS, "short", 41, trained_tokenizer)


def results(speed: float) -> dict[str, Any]:
    """Figures of one point: TRL at 10 examples a second and 100 tokens, ours at ``speed`` times that."""
    arms = {"trl padded": (8.0, 120.0), "trl packed": (10.0, 100.0)}
    arms |= dict.fromkeys(("regular", "branched", "separate"), (10 * speed, 100 / speed))
    summary = {
        name: {
            "speed": {"median": value, "low": value, "high": value},
            "over_trl": {"median": value / 10, "low": value / 10, "high": value / 10},
            "tokens": tokens,
        }
        for name, (value, tokens) in arms.items()
    }
    return {"summary": summary}


@pytest.mark.slow
def test_the_table_and_the_pictures_have_every_point(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, plots = load("tables"), load("plots")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(tables, "HERE", tmp_path)
    # Without results there is nothing to show, and nothing to draw.
    assert tables.pictures_and_table_of_points() == ""
    with pytest.raises(SystemExit, match="no results of the suite prefix; run bench"):
        plots.draw("prefix")
    monkeypatch.setattr(plots, "FOLDER", tmp_path)
    for name, speed in (("2026-01-01-cpu-2-answers", 3.0), ("2026-01-01-cpu-2-answers-2", 2.0)):
        document = {"suites": {"answers": {"points": {"16": results(speed), "2": results(1.0)}}}}
        write_json(tmp_path / "results" / f"{name}.json", document)
    write_json(
        tmp_path / "results" / "2026-01-02-cpu-2-prefix.json",
        {"suites": {"prefix": {"points": {"2000": results(4.0)}}}},
    )
    lines = tables.table_of_points().splitlines()
    # The newer of two results of a day, and points in their order.
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [
        "2 answers to a question",
        "16 answers to a question",
        "2,000 tokens of a shared prefix",
    ]
    assert lines[3].split(" | ")[1:3] == ["2.00, 2.00, 2.00", "0.50, 0.50, 0.50"]
    assert lines[4].split(" | ")[1:3] == ["4.00, 4.00, 4.00", "0.25, 0.25, 0.25"]
    assert tables.pictures_and_table_of_points().count("](plots/performance-") == 2
    for suite in ("answers", "prefix"):
        assert plots.draw(suite).read_bytes().startswith(b"\x89PNG")
