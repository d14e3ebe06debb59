"""What the benchmark of evaluation compares with what."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
evaluation: Any = importlib.import_module("bench_evaluation")


def test_each_arm_is_held_against_the_same_work_one_at_a_time() -> None:
    assert evaluation.one_at_a_time("batch 64") == "batch 1"
    assert evaluation.one_at_a_time("batch 64, generation alone") == "batch 1, generation alone"
    assert evaluation.one_at_a_time("plain loop") == "plain loop"


def test_ratios_are_taken_round_by_round() -> None:
    assert evaluation.over([6.0, 20.0, 9.0], [3.0, 4.0, 3.0])["median"] == 3.0
    assert evaluation.over([], [3.0]) is None


@pytest.mark.parametrize("data", ["nl-rx", "stepmath"])
def test_answered_records_are_not_trained_on(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "TRAIN_RECORDS", 13)
    args = evaluation.parser().parse_args(["--data", data, "--examples", "7"])
    train, test = ([line["messages"][-2]["content"] for line in lines] for lines in evaluation.make_lines(args))
    assert (len(train), len(test)) == (13, 7)
    assert not set(train) & set(test)
