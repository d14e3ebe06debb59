"""What the check of the estimate makes of its runs; the runs themselves take minutes."""

import importlib
import sys
from pathlib import Path

import pytest

from stepjepa.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
check_estimate = importlib.import_module("check_estimate")


def made_up_run(told: float, held: float) -> dict:
    return {
        "told": {"bytes": told, "tensors": 0.5 * told, "parts": {"gradients": 3}, "seconds": 2.0},
        "real": {"bytes": held, "seconds": 4.0, "steps": 7},
    }


def test_cases_are_found_by_parts_of_their_names() -> None:
    every = check_estimate.cases(None)
    assert len(every) == 16
    few = check_estimate.cases(["regular, tiny"])
    assert list(few) == ["regular, tiny, batch 4", "regular, tiny, batch 16"]
    assert few["regular, tiny, batch 16"]["flags"][:3] == ["--regular", "--model_name", "preset:tiny"]
    with pytest.raises(UserError, match="no case has one of nothing"):
        check_estimate.cases(["nothing"])


def test_ratios_are_taken_within_a_round() -> None:
    runs = [made_up_run(100, 80), made_up_run(100, 125), made_up_run(100, 100)]
    case = check_estimate.summarise(runs, tight=40)
    assert case["memory_ratio"] == {"median": 1.0, "low": 0.8, "high": 1.25}
    assert case["tight_ratio"] == pytest.approx(50 / 40)
    assert case["time_ratio"]["median"] == 0.5
    told = check_estimate.table({"cases": {"a case": case}})
    assert "| a case |" in told
    assert "Within 15%: held 1 of 1, tensors 0 of 1, time 0 of 1." in told


def test_what_the_flags_say_is_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = importlib.import_module("check_estimate_child")
    case = next(iter(check_estimate.cases(["selective"]).values()))
    flags = check_estimate._flags({**case, "records": 17}, tmp_path)
    switched: list[object] = []
    monkeypatch.setattr(child, "enable_selective", switched.append)
    assert child.run({"flags": [*flags, "--model_name", "preset:tiny"], "clock": "wall"})["steps"] == 3
    assert len(switched) == 1
