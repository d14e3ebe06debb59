"""``stepjepa sweep``: what it refuses, what it would run, and whole sweeps of real trainings."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from in_process import InProcess
from made_up_runs import change, make_run
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json, write_jsonl
from stepjepa.cli.main import main
from stepjepa.cli.sweep import _conclude
from stepjepa.study import local
from stepjepa.study.grid import Trial
from stepjepa.study.sweep import Outcome
from stepjepa.study.sweep_folder import SweepFolder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def grid(tmp_path: Path) -> dict[str, Any]:
    """A grid of two arms and two seeds, on a handful of records."""
    data = tmp_path / "data.jsonl"
    write_jsonl(data, [{"messages": list(record.messages)} for record in tiny.records()])
    return {
        "train": {
            "train_file": str(data),
            "model_name": "preset:tiny",
            "max_steps": 2,
            "save_steps": 1,
            "use_cpu": True,
            "batch_size": 2,
            "grad_accum": 1,
            "logging_steps": 1,
        },
        "evaluate": {"test_file": str(data), "max_new_tokens": 4, "task": "generic"},
        "arms": {"step-jepa": {"step_jepa": True, "lbd": [0.5]}},
        "seeds": [82, 23],
    }


def write(path: Path, grid: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(grid, sort_keys=False), encoding="utf-8")
    return path


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a sweep that must be refused; returns its one line of error."""
    code = main(["sweep", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, ""), captured
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("stepjepa sweep: error: ")
    return lines[0]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"train": {"lbdd": 1}}, "train.lbdd: unknown argument '--lbdd=1'; did you mean --lbd?"),
    ({"train": {"train_file": "nowhere.jsonl"}}, "train.train_file: nowhere.jsonl: no such --train_file"),
    ({"train": {"regular": True}}, "train.regular: --regular and --step_jepa exclude each other"),
    ({"arms": {"a": {"jepa_loss_type": ["l2", "l3"]}}}, "arms.a.jepa_loss_type: argument --jepa_loss_type"),
    ({"arms": {"a": {"jepa_l2": True}, "b": {"jepa_loss_type": "l2"}}}, "arms.b: 'b' has the same settings as 'a'"),
    ({"arms": {"a": {}, "b": {"jepa_loss_type": "cosine"}}}, "arms.b: 'b' has the same settings as 'a'"),
    ({"evaluate": {"test_file": None}}, "evaluate.test_file: the following arguments are required: --test_file"),
    (
        {"evaluate": {"max_new_tokens": "x"}},
        "evaluate.max_new_tokens: argument --max_new_tokens: expected 1 or more",
    ),
    # Every model was trained before its evaluation was refused.
    ({"evaluate": {"projection_heads": True}}, "evaluate.projection_heads: `projection_heads` does nothing without"),
    ({"evaluate": {"retrieval": True, "linear_map": "nowhere.jsonl"}}, "evaluate.linear_map: nowhere.jsonl: no such"),
    ({"evaluate": {"task": "nowhere:Task"}}, "evaluate.task: "),
    ({"evaluate": {"load_in_4bit": True, "load_in_8bit": True}}, "evaluate.load_in_4bit: "),
    ({"lbd": 1}, "lbd: unknown key; expected train, evaluate, arms, seeds, baseline; flags of train and of evaluate"),
    ({"seeds": ["x"]}, "seeds: expected different whole numbers"),
    # Of a list outside of an arm the second value was an unknown argument of the first arm.
    (
        {"train": {"lbd": 0.1, "use_cpu": [True, False]}},
        "train.use_cpu: takes one value, and has a list of them; leave one",
    ),
    (
        {"evaluate": {"max_new_tokens": [4, 8]}},
        "evaluate.max_new_tokens: takes one value, and has a list of them; leave",
    ),
    (
        {"arms": {"a": {"lbd": [[0.1, 0.5]]}}},
        "arms.a.lbd: takes one value, and has a list of them; leave one, or the inner",
    ),
    ({"train": {"debug": 2}}, "train.debug: is set by the sweep itself; leave it out"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_a_wrong_grid_is_refused_before_anything_starts(
    changes: dict[str, Any], words: str, grid: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    for key, value in changes.items():
        grid[key] = {**grid[key], **value} if key in ("train", "evaluate") else value
    path = write(tmp_path / "grid.yaml", grid)
    error = error_of(capsys, "--config", path, "--output_dir", tmp_path / "sweep")
    assert f"error: {path}:" in error
    assert words in error
    assert not (tmp_path / "sweep").exists()


WRONG: list[tuple[list[str], str]] = [
    (["--job", "2"], "unknown argument '--job'; did you mean --jobs?"),
    (["--jobs", "0"], "--jobs: expected 1 or more, got 0"),
    (["--seeds", "1", "1"], "seeds: expected different whole numbers"),
    (["--only", "step_jepa"], "is called 'step_jepa'; there are regular, step-jepa_lbd0.5"),
    (["--config", "no.yaml"], "no such grid"),
    (["--slurm", "time=5"], "--slurm does nothing without --engine slurm; add it"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=[" ".join(flags) for flags, _ in WRONG])
def test_wrong_flags_are_refused(
    flags: list[str], words: str, grid: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    base = ["--config", write(tmp_path / "grid.yaml", grid), "--output_dir", tmp_path / "sweep"]
    assert words in error_of(capsys, *base, *flags)
    assert not (tmp_path / "sweep").exists()


def test_flags_of_a_cluster(grid: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    base = ["--config", write(tmp_path / "grid.yaml", grid), "--output_dir", tmp_path / "sweep", "--engine", "slurm"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "submitit", None)
        assert "not installed; pip install submitit" in error_of(capsys, *base)
    pytest.importorskip("submitit", reason="jobs are handed in through submitit, which is not installed")
    monkeypatch.setenv("STEPJEPA_SUBMITIT_CLUSTER", "local")
    slurm = [*map(str, base), "--jobs", "3", "--slurm", "timeout_min=90"]
    assert "Unknown argument 'partitoin' for executor 'slurm'" in error_of(capsys, *slurm, "partitoin=a")
    assert main(["sweep", *slurm, "partition=gpu", "--dry_run"]) == 0


def test_a_dry_run_shows_the_commands_and_writes_nothing(grid: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path, folder = write(tmp_path / "grid.yaml", grid), tmp_path / "sweep"
    assert main(["sweep", "--config", str(path), "--output_dir", str(folder), "--dry_run", "--seeds", "7", "8"]) == 0
    out = capsys.readouterr().out
    assert "sweep: 4 trials (2 combinations, 2 seeds): 4 new" in out
    commands = [line.split(" -m stepjepa ")[1].split() for line in out.splitlines() if line.startswith("  $ ")]
    assert [command[0] for command in commands] == ["train", "evaluate"] * 4
    trained = [command for command in commands if command[0] == "train"]
    names = [f"{folder}/{label}/seed{seed}" for label in ("regular", "step-jepa_lbd0.5") for seed in (7, 8)]
    assert [(command[2], command[-1]) for command in trained] == [(f"{name}.yaml", name) for name in names]
    settings = [line for line in out.splitlines() if " (new): " in line]
    assert all(f"finetune_seed {seed}" in line for line, seed in zip(settings, (7, 8, 7, 8), strict=True))
    assert "mode regular" in settings[0] and "mode step-jepa" in settings[2] and "lbd 0.5" in settings[2]
    assert not folder.exists()


def test_flags_without_effect_are_noted_once(grid: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    """A trial starts from settings, in which they are not any more: its log says nothing of them."""
    grid["train"] |= {"lbd": 0.5, "additive_mask": True, "enable_save": True}
    grid["arms"] = {"llm-jepa": {"step_separator": "line"}, "further": {"lbd": [1.0, 2.0]}}
    command = ["sweep", "--config", str(write(tmp_path / "grid.yaml", grid)), "--output_dir", str(tmp_path / "sweep")]
    assert main([*command, "--dry_run"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: --enable_save: no effect here; --save_steps says how often a checkpoint is saved",
        "note: --regular has no views, so --lbd have no effect",
        "note: --additive_mask changes nothing: all views are run in one pass anyway",
        "note: --step_separator has no effect without --step_jepa: the views of llm-jepa are messages",
    ]


def test_the_example_is_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["prepare", "stepmath", "--output_dir", "runs/sweep-data", "--train_size", "20", "--test_size", "5"]) == 0
    )
    example = str(ROOT / "examples" / "sweep.yaml")
    assert main(["sweep", "--config", example, "--output_dir", "runs/sweep", "--only", "regular,82", "--dry_run"]) == 0
    assert "sweep: 6 trials (3 combinations, 2 seeds), 1 of them chosen: 1 new" in capsys.readouterr().out


def figures(out: str) -> list[list[str]]:
    """The tables of a sweep, without the seconds, which no two trainings share."""
    rows = [line.split() for line in out.splitlines() if re.match(r"\S+/seed\d+ ", line)]
    return [row[:-1] for row in rows]


def test_failures_are_told_also_where_there_is_no_table(tmp_path: Path, capsys: Any) -> None:
    """The test file was changed between two starts."""
    trials = [Trial(f"regular/seed{seed}", "regular", "regular", seed, {}, ()) for seed in (1, 2, 3)]
    for trial in trials[:2]:
        make_run(tmp_path / trial.name, "10", seed=trial.seed)
    change(tmp_path / trials[1].name / "test.summary.json", "test_fingerprint", to="e" * 64)
    outcome = Outcome(trials[:2], {trials[2].name: "train failed with exit code 1: out of memory"})
    with pytest.raises(UserError, match="can't be compared with"):
        _conclude(SweepFolder(tmp_path, trials, {}), outcome, 3)
    assert capsys.readouterr().out.splitlines() == [
        "failed: regular/seed3: train failed with exit code 1: out of memory",
        "1 of 3 trials failed; their logs are beside them; the same command retries",
    ]


@pytest.mark.slow
def test_a_whole_sweep_of_real_trainings(
    grid: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(local, "Child", InProcess)
    path, folder = write(tmp_path / "grid.yaml", grid), tmp_path / "sweep"
    command = ["sweep", "--config", str(path), "--output_dir", str(folder), "--jobs", "2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "[4/4] " in out
    table = figures(out)
    names = [f"{label}/seed{seed}" for label in ("regular", "step-jepa_lbd0.5") for seed in (82, 23)]
    assert [row[0] for row in table[:4]] == names
    assert [row[1] for row in table[:4]] == ["regular", "regular", "step-jepa", "step-jepa"]
    runs = [json.loads((folder / name / "run.json").read_text()) for name in names]
    assert [run["training"]["seed"] for run in runs] == [82, 23, 82, 23]
    assert all(run["results"]["steps"] == 2 for run in runs)
    assert out.strip().splitlines()[-1] == f"next: stepjepa compare {folder}"
    assert main(["compare", str(folder), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [(arm["name"], arm["seeds"]) for arm in compared["arms"]] == [
        ("regular", ["23", "82"]),
        ("step-jepa_lbd0.5", ["23", "82"]),
    ]
    for run in (run for arm in compared["arms"] for run in arm["runs"]):
        (file,) = Path(run["folder"]).glob("*.summary.json")
        summary = json.loads(file.read_text())
        assert (run["headline"], run["gold_loss"]) == (summary["scores"]["exact"]["mean"], summary["gold_loss"])
        assert run["steps"] == 2
    # Under another version the next trials are, and it is said.
    run = folder / names[0] / "run.json"
    recorded = run.read_text()
    write_json(run, {**runs[0], "versions": {**runs[0]["versions"], "torch": "2.3"}})
    assert main([*command, "--seeds", "82", "23", "37", "--dry_run"]) == 0
    assert "note: trials were begun with torch 2.3 (now " in capsys.readouterr().err
    run.write_text(recorded)
    # With other seeds alone, 'compare' would show these alone.
    assert main([*command, "--seeds", "37", "--dry_run"]) == 0
    others = "regular/seed23, regular/seed82, step-jepa_lbd0.5/seed23, step-jepa_lbd0.5/seed82"
    assert f"note: the folder also has 4 finished trials not in the grid ({others}), which" in capsys.readouterr().err
    # Once more there is nothing to do; another grid under the same names is refused.
    assert main(command) == 0
    again = capsys.readouterr().out
    assert "sweep: 4 trials (2 combinations, 2 seeds): 4 finished" in again
    assert figures(again) == table
    write(path, {**grid, "train": {**grid["train"], "max_steps": 3}})
    error = error_of(capsys, *command[1:])
    assert "regular/seed82: was begun with other flags of 'stepjepa train'" in error


@pytest.mark.slow
def test_a_bad_line_is_told_once_and_put_right_in_the_same_folder(
    grid: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(local, "Child", InProcess)
    data = Path(grid["train"]["train_file"])
    data.write_text(data.read_text() + '{"question": "Why?", "answer": ""}\n')
    path, folder = write(tmp_path / "grid.yaml", grid), tmp_path / "sweep"
    command = ["sweep", "--config", str(path), "--output_dir", str(folder)]
    assert main(command) == 1
    *_, failed, count, others = capsys.readouterr().out.splitlines()
    assert failed.startswith("failed: regular/seed82, step-jepa_lbd0.5/seed82: train failed with exit code 2: ")
    assert "leave such rows out with --bad_records skip" in failed
    assert count.startswith("2 of 4 trials failed;")
    assert others == (
        "2 other trials were not run, since every arm failed with this error: correct the grid or the data first"
    )
    for part in ("train", "evaluate"):
        grid[part]["bad_records"] = "skip"
    write(path, grid)
    assert main(command) == 0
    assert "[4/4] " in capsys.readouterr().out
