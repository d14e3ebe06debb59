"""What a report is made of: runs, sweeps, and what is missing or damaged in them."""

import json
from pathlib import Path

import pytest

from made_up_runs import change, evaluate, log, make_run
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json
from stepjepa.study.comparison import compare
from stepjepa.study.page.logged_run import read_runs
from stepjepa.study.page.page import write_page
from stepjepa.study.run_folders import notes_on_missing_trials, run_names


def test_names_tell_runs_apart():
    assert run_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert run_names([Path("/x/a/seed3"), Path("/x/b/seed3")]) == ["a/seed3", "b/seed3"]
    assert run_names([Path("/x/seed3")]) == ["seed3"]


def test_a_run_without_evaluation_and_logs_has_notes(tmp_path):
    folder = make_run(tmp_path / "a", "1", status="interrupted")
    for file in ("test.jsonl", "test.summary.json"):
        (folder / file).unlink()
    (run,) = read_runs([folder])
    assert run.metrics == [] and run.evaluations == {}
    assert run.notes == [
        "The run is not finished (status interrupted); the page shows it as far as it came.",
        f"Nothing is shown over steps: {folder / 'metrics.jsonl'}: no such file; check the path.",
    ]


def test_what_is_damaged_is_noted_and_left_out(tmp_path):
    folder = make_run(tmp_path / "a", "110")
    log(folder, 3)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"step": "four", "loss": 1.0}\n[1]\n{"step": 28, "lo')
    evaluate(folder, "100", name="dev")
    (folder / "dev.summary.json").write_text("{")
    (run,) = read_runs([folder])
    assert len(run.metrics) == 3
    assert list(run.evaluations) == ["test"]
    first, second = run.notes
    assert first.startswith(f"Lines of metrics.jsonl can't be read (2; the first is {folder / 'metrics.jsonl'}:5: ")
    assert second.startswith("An evaluation is skipped: ") and "dev.summary.json:1: is damaged" in second


def test_an_evaluation_of_another_model_is_noted(tmp_path):
    folder = make_run(tmp_path / "a", "110")
    log(folder)
    (folder / "model.safetensors").write_text("trained on", encoding="utf-8")
    (run,) = read_runs([folder])
    assert run.notes == ["The evaluation test is of another model than the one in the folder; evaluate again."]


def sweep(folder: Path, *names: str, baseline: str = "regular") -> None:
    trials = [{"name": name, "arm": name.partition("/")[0], "label": name.partition("/")[0]} for name in names]
    write_json(folder / "sweep.json", {"grid": {"baseline": baseline}, "trials": trials})


def test_a_sweep_stands_for_its_finished_trials(tmp_path, arms):
    names = ["step/seed2", "regular/seed2", "step/seed3", "never/seed2"]
    sweep(tmp_path, *names)
    change(tmp_path / "step" / "seed3" / "run.json", "status", to="running")
    runs = read_runs([tmp_path])
    assert [(run.name, run.arm, run.is_baseline) for run in runs] == [
        ("step/seed2", "step", False),
        ("regular/seed2", "regular", True),
    ]


def test_unfinished_trials_are_named_where_runs_are_shown(tmp_path, arms):
    """A failed seed, or a whole arm, must not be missing without a word."""
    sweep(tmp_path, *(f"{arm}/seed{seed}" for arm in ("regular", "step", "never") for seed in (2, 3, 5)))
    assert compare([tmp_path]).notes[0] == (
        f"{tmp_path}: 3 of 9 trials are not finished, and left out: never/seed2, never/seed3, never/seed5"
    )
    change(tmp_path / "step" / "seed3" / "run.json", "status", to="failed")
    write_json(tmp_path / "step" / "seed3.trial.json", {"status": "failed"})
    (note,) = notes_on_missing_trials([tmp_path, tmp_path / "step" / "seed2"])
    assert "4 of 9 trials are not finished, and left out: step/seed3 (failed), never/seed2" in note
    write_page([str(tmp_path)], str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f'<p class="note">{note}</p>' in page
    sweep(tmp_path, "regular/seed2", "step/seed2")
    assert notes_on_missing_trials([tmp_path]) == []
    assert "left out" not in " ".join(compare([tmp_path]).notes)


def test_a_sweep_does_not_reach_outside_its_folder(tmp_path):
    make_run(tmp_path / "other", "1")
    folder = tmp_path / "sweep"
    folder.mkdir()
    sweep(folder, "../other", str(tmp_path / "other"))
    with pytest.raises(UserError, match="none of the trials of this sweep is finished"):
        read_runs([folder])


@pytest.mark.parametrize("text", ['{"trials": 3}', '{"trials": [3, {"name": 5}, {"name": null}]}', "[]", "{"])
def test_a_damaged_sweep_is_one_line(text, tmp_path):
    (tmp_path / "sweep.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        read_runs([tmp_path])


def test_folders_that_are_no_runs_and_runs_named_twice_are_refused(tmp_path):
    with pytest.raises(UserError, match="is no run folder"):
        read_runs([tmp_path])
    folder = make_run(tmp_path / "a", "1")
    with pytest.raises(UserError, match="is named twice"):
        read_runs([folder, tmp_path / "." / "a"])
    (folder / "run.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(UserError, match=r"run\.json: is damaged"):
        read_runs([folder])
