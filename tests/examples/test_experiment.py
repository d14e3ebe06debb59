"""The experiment: its grids are ones that there are, its data is cut as it says, its page is what its figures give."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from run_figures import read_figures

from made_up_runs import make_run
from stepjepa.cli import main
from stepjepa.tasks.regex import equivalent

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "examples" / "experiment"
GRIDS = sorted(EXPERIMENT.glob("*.yaml"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXPERIMENT))
    # Names as common as these may be taken by other tests' modules.
    names = ("data", "collect", "languages", "splits", "untouched", "frame", "pictures", "results")
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
    for name in sorted(set(re.findall(r"runs/experiment/[\w/-]+\.jsonl", grid.read_text()))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(record("answer", 1) + "\n")
    shared = tmp_path.parent / "shared" / "data" / "llm_jepa"
    shared.mkdir(parents=True, exist_ok=True)
    for name in ("synth_train", "synth_test", "gsm8k_train", "gsm8k_test"):
        (shared / f"{name}.jsonl").write_text(record("answer", 1) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "terms"))
    assert main(["sweep", "--config", str(grid), "--output_dir", str(data / grid.stem), "--dry_run"]) == 0
    assert "baseline" not in capsys.readouterr().err
    assert not (data / grid.stem).exists()


def test_every_number_is_what_the_figures_give(scripts: dict[str, ModuleType], tmp_path: Path, capsys) -> None:
    assert scripts["results"].main(["--check"]) == 0, capsys.readouterr().out
    # One verdict of one run turned round.
    figures = tmp_path / "figures"
    shutil.copytree(EXPERIMENT / "figures", figures)
    content = json.loads((figures / "turk.json").read_text())
    verdicts = content["runs"][0]["examples"]["headline"]
    content["runs"][0]["examples"]["headline"] = f"{int(verdicts[0], 16) ^ 8:x}{verdicts[1:]}"
    (figures / "turk.json").write_text(json.dumps(content))
    assert scripts["results"].main(["--check", "--figures", str(figures)]) == 1
    changed = capsys.readouterr().out
    assert "results.md" in changed
    assert "runs.csv" in changed


def sweep_of(folder: Path, trials: list[tuple[str, int, str, str]]) -> Path:
    """A sweep folder: label, seed, status and right answers of every trial."""
    listed = []
    for label, seed, status, right in trials:
        name = f"{label}/seed{seed}"
        jepa = {"mode": "regular"} if label.startswith("regular") else {"mode": "llm-jepa", "lbd": 0.5}
        jepa["labels"] = "reference" if label.endswith("-reference") else "assistant"
        longer = label == "regular-1.3x"
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


def test_rows_at_equal_steps_and_at_equal_flops(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    rights = {"regular": ("11000", "10000"), "regular-1.3x": ("11100", "10000"), "arm": ("11110", "11000")}
    sweep = sweep_of(tmp_path / "steps-test", of_two_seeds(rights))
    scripts["collect"].main([str(sweep), "--figures", str(tmp_path)])
    table = scripts["frame"].read(tmp_path)
    assert scripts["frame"].same_flops(table, "steps-test", "arm") == "regular-1.3x"
    heads = scripts["results"].HEADS
    row = dict(zip(heads, list(scripts["results"].Questions(table).rows("steps-test"))[-1], strict=True))
    # By hand: 80 and 40 %, plain 40 and 20, for its FLOPs 60 and 20; differences 40 and 20, 20 and 20.
    assert (row["arm"], row["right, %"], row["FLOPs"]) == ("arm", "60.0 ± 28.3", "1.30")
    assert row["at equal steps, points [95 %]"] == "+30.0 [-97.1, +157.1]"
    assert row["at equal FLOPs, points [95 %]"] == "+20.0"


def test_a_score_is_taken_apart(scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch) -> None:
    splits = scripts["splits"].split(["dog.*", "([0-9]){3,}"], ["(dog.*)|(dog.*)", "([a-z]){7,}", "lake", ".*(.*)"])
    assert splits == {
        "number": [False, True, False, False],
        "language": [True, False, False, False],
        "shape": [False, True, False, False],
        "trivial": [False, False, False, True],
    }
    monkeypatch.setattr(scripts["frame"], "read_splits", lambda: {"synth": splits})
    sweep = sweep_of(tmp_path / "synth", [("a", 23, "finished", "1100")])
    scripts["collect"].main([str(sweep), "--figures", str(tmp_path)])
    row = scripts["frame"].read(tmp_path).iloc[0]
    assert [row[name] for name in ("right", "number", "language seen", "shape new")] == [
        50,
        100,
        100,
        pytest.approx(100 / 3),
    ]
    assert row["rest"] == pytest.approx(100 / 3)
    assert scripts["frame"].copies(row)


def test_weights_give_a_set_the_operators_of_another(scripts: dict[str, ModuleType]) -> None:
    # Of four answers two have "&" and one "|"; of those looked at two in three have "&", and none "~".
    here, there = ["a&b", "c&d", "a|b", "e"], ["a&b", "x&y", "z", "~(q)"]
    # 2 of 3 for two records, 1 of 3 for one, times four records; "|" is not among the others, "~" is not here.
    assert scripts["untouched"].weights(here, there) == [pytest.approx(4 / 3, abs=1e-4)] * 2 + [
        0,
        pytest.approx(4 / 3, abs=1e-4),
    ]
    assert scripts["frame"].share([1, 0, 1, 1], [2, 1, 0, 1]) == 75
    assert scripts["frame"].share([1, 0], [0, 0]) is None


def test_the_weights_are_those_of_the_record(scripts: dict[str, ModuleType]) -> None:
    found = json.loads((EXPERIMENT / "untouched.json").read_text())
    weights = scripts["untouched"].read_weights()
    assert len(weights) == found["untouched"]["records"]
    assert sum(weights) / len(weights) == pytest.approx(1, abs=1e-3)


def test_languages_are_those_of_every_pair_compared(scripts: dict[str, ModuleType], shared_data: Path) -> None:
    lines = (shared_data / "llm_jepa" / "synth_train.jsonl").read_text(encoding="utf-8").splitlines()[:97]
    expressions = [scripts["data"].answer(line) for line in lines]
    languages = scripts["languages"].Languages()
    found = [languages.of(text) for text in expressions]
    slow = [next(other for other in expressions if equivalent(other, text)) for text in expressions]
    assert found == slow
    assert len(set(found)) < len(set(expressions))


def test_the_splits_are_those_of_the_data(scripts: dict[str, ModuleType], shared_data: Path) -> None:
    files = (shared_data / "llm_jepa" / f"synth_{name}.jsonl" for name in ("train", "test"))
    train, test = map(scripts["splits"].answers, files)
    found = scripts["splits"].read_splits()["synth"]
    assert found["number"] == ["{" in text for text in test]
    shapes = {scripts["splits"].shape(text) for text in train}
    assert found["shape"] == [scripts["splits"].shape(text) in shapes for text in test]
    # Whoever has the text has the language.
    known = set(train)
    assert all(seen for seen, text in zip(found["language"], test, strict=True) if text in known)
