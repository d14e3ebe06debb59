"""The experiment: its grids are ones that there are, its data is cut as it says, its page is what its figures give."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from run_figures import read_figures

from made_up_runs import make_run
from stepjepa.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "examples" / "experiment"
GRIDS = sorted(EXPERIMENT.glob("*.yaml"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXPERIMENT))
    # Names as common as these may be taken by other tests' modules.
    names = ("data", "collect", "results", "shares", "unseen", "arms", "overview")
    for name in names:
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        importlib.sys.modules.pop(name, None)


def record(answer: str, number: int) -> str:
    turns = [("user", f"question {number}"), ("assistant", answer)]
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def test_answers_stay_together_and_nothing_is_lost(scripts: dict[str, ModuleType]) -> None:
    lines = [record(f"answer {number % 13}", number) for number in range(101)]
    first, second, rest = scripts["data"].cut(lines, 11, 17)
    assert sorted([*first, *second, *rest]) == sorted(lines)
    answers = [{scripts["data"].answer(line) for line in part} for part in (first, second, rest)]
    assert not answers[0] & answers[1] | answers[0] & answers[2] | answers[1] & answers[2]
    # Of an answer there are 7 or 8 records, so a set is at most that much too large.
    assert 11 <= len(first) < 11 + 8
    assert 17 <= len(second) < 17 + 8
    assert first == [line for line in lines if line in first]


@pytest.mark.parametrize("grid", GRIDS, ids=[grid.stem for grid in GRIDS])
def test_every_grid_expands(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    data = tmp_path / "runs" / "experiment"
    # Only that the files are there is asked for before a trial begins.
    for name in sorted({word for word in grid.read_text().split() if word.startswith("runs/experiment/")}):
        if name.endswith(".jsonl"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(record("answer", 1) + "\n")
    shared = tmp_path.parent / "shared" / "data" / "llm_jepa"
    shared.mkdir(parents=True, exist_ok=True)
    for name in ("synth_train", "synth_test", "gsm8k_train", "gsm8k_test"):
        (shared / f"{name}.jsonl").write_text(record("answer", 1) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--config", str(grid), "--output_dir", str(data / grid.stem), "--dry_run"]) == 0
    assert "baseline" not in capsys.readouterr().err
    assert not (data / grid.stem).exists()


def test_the_page_is_what_the_figures_give(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    assert scripts["results"].main(["--check", "--plots", str(tmp_path)]) == 0


def sweep_of(folder: Path, trials: list[tuple[str, int, str, str]]) -> Path:
    """A sweep folder: label, seed, status and right answers of every trial."""
    listed = []
    for label, seed, status, right in trials:
        name = f"{label}/seed{seed}"
        jepa = {"mode": "regular"} if label.startswith("regular") else {"mode": "llm-jepa", "lbd": 0.5}
        jepa["labels"] = "reference" if label.endswith("-reference") else "assistant"
        longer = label == "regular-long"
        if status == "finished":
            make_run(
                folder / name,
                right,
                seed=seed,
                jepa=jepa,
                training={"num_train_epochs": 3.9} if longer else None,
                steps=26 if longer else 20,
                flops=1e9 if label in ("regular", "regular-reference") else 1.3e9,
            )
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.trial.json").write_text(json.dumps({"status": status}))
        listed.append({"name": name, "label": label, "seed": seed})
    (folder / "sweep.json").write_text(json.dumps({"trials": listed}))
    return folder


def of_two_seeds(rights: dict[str, tuple[str, str]]) -> list[tuple[str, int, str, str]]:
    """Finished trials for :func:`sweep_of`: the right answers of both seeds by label."""
    return [
        (label, seed, "finished", right)
        for label, both in rights.items()
        for seed, right in zip((23, 82), both, strict=True)
    ]


def test_figures_of_two_machines_are_put_together(scripts: dict[str, ModuleType], tmp_path: Path, capsys) -> None:
    figures = tmp_path / "figures"
    here = sweep_of(tmp_path / "here" / "a", [("regular", 23, "finished", "11000"), ("jepa", 23, "failed", "")])
    assert scripts["collect"].main([str(here), "--figures", str(figures), "--missing"]) == 0
    assert capsys.readouterr().out == "jepa/seed23\n"
    assert not figures.exists()
    assert scripts["collect"].main([str(here), "--figures", str(figures)]) == 0
    there = sweep_of(tmp_path / "there" / "a", [("regular", 23, "new", ""), ("jepa", 23, "finished", "11100")])
    assert scripts["collect"].main([str(there), "--figures", str(figures)]) == 0
    assert [each.key for each in read_figures(figures / "a.json")] == [("jepa", "23"), ("regular", "23")]
    with pytest.raises(SystemExit):
        scripts["collect"].main([str(tmp_path), "--figures", str(figures)])
    assert "sweep.json" in capsys.readouterr().err


def test_a_page_tells_arms_and_tests_also_at_equal_flops(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    rights = {
        "regular": ("11000", "10000"),
        "regular-long": ("11100", "10000"),
        "regular-reference": ("10000", "10000"),
        "jepa": ("11110", "11100"),
        "jepa-reference": ("11000", "11110"),
    }
    sweep = sweep_of(tmp_path / "a", of_two_seeds(rights))
    scripts["collect"].main([str(sweep), "--figures", str(tmp_path / "figures")])
    page = tmp_path / "results.md"
    page.write_text("# Results\n\n<!-- a: begin -->\nstale text\n<!-- a: end -->\n<!-- b: begin -->\n<!-- b: end -->\n")
    where = ["--page", str(page), "--figures", str(tmp_path / "figures"), "--plots", str(tmp_path / "plots")]
    assert scripts["results"].main([*where, "--check"]) == 1
    assert scripts["results"].main(where) == 0
    assert scripts["results"].main([*where, "--check"]) == 0
    text = page.read_text()
    # By hand: 4/5 and 3/5 are right, 1.3e9 / 1e9 FLOPs.
    row = next(line for line in text.splitlines() if line.startswith("| jepa | 2 |"))
    assert "70.0% ± 14.1" in row
    assert row.endswith("| 1.00 | 1.30 |")
    assert "stale text" not in text
    assert "Not run yet." in text
    same_flops = text[text.index("At equal FLOPs, against regular-long, paired by seed") :].split("\n\n")[1]
    assert [line.split(" | ")[0] for line in same_flops.splitlines()[2:]] == ["| jepa"]
    # The published way against its own baseline, by hand: 2/5 - 1/5 and 4/5 - 1/5.
    published = text[text.index("At equal steps, against regular-reference, paired by seed") :].split("\n\n")[1]
    assert [line.split(" | ")[:2] for line in published.splitlines()[2:]] == [["| jepa-reference", "2"]]
    assert "| +40.00 [" in published
    assert (tmp_path / "plots" / "results-a.png").stat().st_size > 0
    shutil.rmtree(tmp_path / "figures")
    assert scripts["results"].main([*where, "--check"]) == 1


def test_a_curve_over_shares(scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts["shares"], "SHARES", {"a": 3, "b": 7, "c": 11})
    rights = {
        "a": {("regular", 23): "10000", ("regular", 82): "11000", ("jepa", 23): "11000", ("jepa", 82): "11110"},
        "b": {("regular", 23): "11100", ("regular", 82): "11110", ("jepa", 82): "11111", ("other", 82): "11111"},
    }
    for name, runs in rights.items():
        trials = [(label, seed, "finished", right) for (label, seed), right in runs.items()]
        sweep = sweep_of(tmp_path / name, trials)
        scripts["collect"].main([str(sweep), "--figures", str(tmp_path / "figures")])
    page = tmp_path / "results.md"
    page.write_text("<!-- shares: begin -->\n<!-- shares: end -->\n")
    where = ["--page", str(page), "--figures", str(tmp_path / "figures"), "--plots", str(tmp_path / "plots")]
    assert scripts["results"].main(where) == 0
    lines = page.read_text().splitlines()
    # By hand: shares of five answers; paired differences 1/5 and 2/5, whose interval is 30 ± 12.706 * 14.142 / sqrt(2).
    assert lines[2:7] == [
        "| records | 3 | 7 |",
        "|---|---:|---:|",
        "| regular | 30.0% ± 14.1 (2 seeds) | 70.0% ± 14.1 (2 seeds) |",
        "| jepa | 60.0% ± 28.3 (2 seeds) | 100.0% |",
        "| jepa − regular, points [95 %] | +30.0 [-97.1, +157.1] | +20.0 |",
    ]
    assert "other" not in page.read_text()
    assert (tmp_path / "plots" / "results-shares.png").stat().st_size > 0
    shutil.rmtree(tmp_path / "figures")
    assert scripts["results"].main(where) == 0
    assert "Not run yet." in page.read_text()


def test_the_overview_holds_every_arm_against_plain_training(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    rights = {
        "regular": ("11000", "10000"),
        "regular-long": ("11110", "11100"),
        "regular-reference": ("10000", "10000"),
        "jepa": ("11100", "11100"),
        "jepa-reference": ("11111", "11111"),
    }
    scripts["collect"].main(
        [str(sweep_of(tmp_path / "synth", of_two_seeds(rights))), "--figures", str(tmp_path / "figures")]
    )
    page = tmp_path / "results.md"
    page.write_text("<!-- overview: begin -->\nstale text\n<!-- overview: end -->\n")
    where = ["--page", str(page), "--figures", str(tmp_path / "figures"), "--plots", str(tmp_path / "plots")]
    assert scripts["results"].main(where) == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    # By hand: 3/5 against 2/5 and 1/5, and, for as many FLOPs, against 4/5 and 3/5; t at one degree of freedom: 12.7.
    cells = [
        "synth",
        "jepa",
        "2",
        "60.0% ± 0.0",
        "30.0% ± 14.1",
        "+30.0 [-97.1, +157.1]",
        "-10.0 [-137.1, +117.1]",
        "1.30",
    ]
    assert [row.strip("| ").split(" | ")[:8] for row in rows[1:]] == [cells]
    assert "stale" not in page.read_text()


def test_right_answers_without_those_that_a_training_record_has(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    train = [record("x", 1), record("y", 2)]
    # A record of the training file, another question with its answer, and two that are new.
    test = [record("z", 1), record("x", 1), record("w", 7), record("y", 9)]
    assert scripts["unseen"].seen(train, test) == {"answer": [1, 3], "record": [1]}
    sweep = sweep_of(tmp_path / "synth", [("a", 23, "finished", "11000"), ("a", 82, "finished", "01011")])
    scripts["collect"].main([str(sweep), "--figures", str(tmp_path)])
    rows = scripts["unseen"].rows(read_figures(tmp_path / "synth.json"), [1, 3])
    # By hand: 2/5 and 3/5; of examples 0, 2 and 4 one third in both.
    assert rows[1:] == [["a", "50.0% ± 14.1", "33.3% ± 0.0"]]


def test_the_answers_that_were_seen_are_those_of_the_data(scripts: dict[str, ModuleType], shared_data: Path) -> None:
    train, test = (
        (shared_data / "llm_jepa" / f"synth_{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for name in ("train", "test")
    )
    found = scripts["unseen"].seen(train, test)
    assert found["answer"] == scripts["unseen"].read_seen()
    assert set(found["record"]) < set(found["answer"])


def test_arms_are_told_by_their_flags(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("arms:\n  plain: {regular: true}\n  far: {layout: separate, lbd: 0.5}\n")
    expected = [["arm", "flags"], ["plain", "`--regular`"], ["far", "`--layout separate --lbd 0.5`"]]
    assert scripts["arms"].rows(tmp_path / "a.yaml") == expected
