"""Runs whose launches had different settings, other data or other base weights, in a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stepjepa
from made_up_runs import change, make_run
from stepjepa.base.errors import UserError
from stepjepa.cli.main import main
from stepjepa.study.comparison import compare

LLM = {"mode": "llm-jepa", "lbd": 0.5}
RATE = {"name": "learning_rate", "before": 2e-5, "now": 1e-4, "mixed": True}
TORCH = {"name": "torch (version)", "before": "2.13.0", "now": "2.14.0", "mixed": False}


def launches(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    first = {"seconds": 1.0, "from_step": 0, "to_step": 5}
    return [first, {"seconds": 1.0, "from_step": 5, "to_step": 10, "changes": list(changes)}]


@pytest.fixture
def arms(tmp_path: Path) -> list[Path]:
    """Three seeds of two arms, of which every run of the second is right more often."""
    return [
        make_run(tmp_path / f"{name}-{seed}", right, seed=seed, jepa=jepa)
        for name, jepa, answers in (
            ("regular", {"mode": "regular"}, ("1000", "1100", "1000")),
            ("llm", LLM, ("1110", "1111", "1100")),
        )
        for seed, right in zip((3, 5, 7), answers, strict=True)
    ]


def test_a_run_resumed_with_another_rate_is_kept_out_and_named(arms: list[Path], capsys: Any) -> None:
    clean = compare(arms)
    assert clean.kept_out == () and len(clean.arms[1].runs) == 3
    change(arms[4] / "run.json", "launches", to=launches(RATE))
    mixed = compare(arms)
    assert [len(arm.runs) for arm in mixed.arms] == [3, 2]
    assert mixed.differences["llm-jepa"].seeds == ("3", "7")
    (kept_out,) = mixed.kept_out
    assert (kept_out.run.folder, kept_out.arm) == (arms[4], "llm-jepa")
    (note,) = [note for note in mixed.notes if "kept out" in note]
    assert note == (
        f"llm-jepa: {arms[4]} (seed 5) is kept out: resumed at step 5 with another learning_rate: 2e-05 -> 0.0001; "
        "`mixed_runs` lets it in"
    )
    assert compare(arms, mixed_runs=True).differences == clean.differences
    assert any("learning_rate: 2e-05 -> 0.0001" in note for note in compare(arms, mixed_runs=True).notes)
    names = [str(arm) for arm in arms]
    assert main(["compare", *names, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [each["folder"] for each in table["kept_out"]] == [str(arms[4])]
    assert main(["compare", *names, "--mixed_runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept_out"] == []


def test_a_launch_without_a_step_in_the_run_keeps_nothing_out(arms: list[Path]) -> None:
    first, second = launches(RATE)
    lost = [{**first}, {**second, "to_step": 5}, {"seconds": 1.0, "from_step": 5, "to_step": 10, "changes": []}]
    change(arms[4] / "run.json", "launches", to=lost)
    compared = compare(arms)
    assert compared.kept_out == () and not any("learning_rate" in note for note in compared.notes)
    # A run that begins with the checkpoint of another one has its changes from the start, and may take no step.
    change(arms[4] / "run.json", "launches", to=[{**second, "from_step": 10}])
    assert [each.run.folder for each in compare(arms).kept_out] == [arms[4]]


def test_other_versions_are_noted_alone(arms: list[Path]) -> None:
    change(arms[4] / "run.json", "launches", to=launches(TORCH))
    compared = compare(arms)
    assert len(compared.arms[1].runs) == 3 and compared.kept_out == ()
    assert any("torch (version): 2.13.0 -> 2.14.0" in note for note in compared.notes)


def test_where_all_runs_of_an_arm_are_mixed_the_reason_is_said(arms: list[Path]) -> None:
    for arm in arms[3:]:
        change(arm / "run.json", "launches", to=launches(RATE))
    with pytest.raises(UserError, match=r"is kept out \(resumed at step 5 with another learning_rate.*`mixed_runs`"):
        compare(arms)


def test_arms_on_other_texts_are_refused(arms: list[Path]) -> None:
    for arm in arms:
        change(arm / "run.json", "fingerprints", to={"texts": "a", "records": arm.name, "weights": "w"})
    assert not any("training texts" in note for note in compare(arms).notes)
    # The same texts of another file are the same data.
    change(arms[3] / "run.json", "data", "train", "sha256", to="e" * 64)
    compare(arms)
    change(arms[3] / "run.json", "fingerprints", "texts", to="b")
    change(arms[3] / "run.json", "data", "train", "sha256", to="d" * 64)
    with pytest.raises(UserError, match=f"can't be compared with {arms[0]}: its training texts differ"):
        compare(arms)
    # From seed to seed it is said: each difference is between like runs, but the arms are of two kinds of runs.
    for place in (0, 3):
        change(arms[place] / "run.json", "fingerprints", "texts", to="b")
    of_other_texts = (
        "the runs of regular and of llm-jepa differ in more than their seed: in training texts, by columns, "
    )
    assert any(note.startswith(of_other_texts) for note in compare(arms).notes)
    change(arms[0] / "run.json", "fingerprints", "texts", to="a")
    # Other settings make other texts, and are what the arm is about.
    change(arms[3] / "run.json", "jepa", "max_length", to=77)
    compare(arms)


def test_arms_that_began_with_other_weights_are_refused_within_a_seed(arms: list[Path]) -> None:
    for number, arm in enumerate(arms):
        # The weights of a preset depend on the seed.
        change(arm / "run.json", "fingerprints", to={"texts": "a", "weights": str(number % 3)})
    compare(arms)
    change(arms[4] / "run.json", "fingerprints", "weights", to="other")
    with pytest.raises(UserError, match=f"can't be compared with {arms[1]}: its base weights differ"):
        compare(arms)


def test_the_object_of_a_comparison(arms: list[Path]) -> None:
    for _ in range(2):
        compared = stepjepa.compare(arms)
    better = "at equal steps, better than regular in right answers (exact match): llm-jepa by +41.67 points"
    assert compared.verdict.startswith(better)
    table = compared.table
    assert list(table.index) == ["regular", "llm-jepa"] and table.loc["llm-jepa", "seeds"] == 3
    # 3/4, 4/4, 2/4 against 1/4, 2/4, 1/4.
    assert table.loc["llm-jepa", "exact"] == pytest.approx(0.75)
    assert table.loc["llm-jepa", "difference"] == pytest.approx(5 / 12)
    assert table.loc["llm-jepa", "Holm p"] == compared.differences["llm-jepa"].holm
    html = compared._repr_html_()
    # As the page has it: sentences, one table of few columns in per cent and points, what the heads mean.
    assert html.count("<table") == 1 and html.count("<th>") == 6 + 2
    assert f"<p>{compared.verdict}</p>" in html and "<td>33.3% ± 14.4</td>" in html and "arm: runs that" in html
    assert len(repr(compared)) < 500 and "regular: 3 runs" in repr(compared)
    figure = compared.plot()
    assert len(figure.axes) >= 1
    with pytest.raises(ValueError, match="tails: expected one of one, two, got 'three'"):
        stepjepa.compare(arms, tails="three")
