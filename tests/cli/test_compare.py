"""``stepjepa compare`` from the command line, on made-up runs and on real ones."""

import json
import shutil

import pytest

from made_up_runs import make_run
from stepjepa.cli.main import main

MORE = "more figures: the same command with --details\n"


@pytest.fixture
def runs(tmp_path):
    """Two seeds of two arms."""
    result = []
    for name, jepa, rights in (("a", None, ("1000", "1100")), ("b", {"mode": "step-jepa"}, ("1110", "1110"))):
        for seed, right in enumerate(rights, start=1):
            result.append(make_run(tmp_path / f"{name}{seed}", right, seed=seed, jepa=jepa))
    return result


def compare(*arguments):
    return main(["compare", *map(str, arguments)])


def test_every_format_to_the_terminal_or_a_file(runs, tmp_path, capsys):
    for kind in ("text", "markdown", "json"):
        assert compare(*runs, "--format", kind) == 0
        printed = capsys.readouterr().out
        assert "step-jepa" in printed
        plain = printed.replace("\\", "")
        assert "--same_flop" in plain and "`same_flop`" not in plain
        file = tmp_path / "out" / f"table.{kind}"
        assert compare(*runs, "--format", kind, "--output-file", file) == 0
        assert capsys.readouterr().out == f"written: {file}\n"
        assert file.read_text(encoding="utf-8") == printed


def test_a_damaged_line_of_answers_is_named_with_what_to_do(runs, capsys):
    answers = runs[1] / "test.jsonl"
    answers.write_text(answers.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert compare(*runs) == 2
    error = capsys.readouterr().err
    assert f"{answers}:4: not valid JSON" in error and error.endswith("evaluate the run again, with --overwrite\n")


def test_the_folder_of_a_sweep_stands_for_its_runs(runs, tmp_path, capsys):
    """Under the names of its arms, against its baseline, though there is a second arm of plain training."""
    for seed, right in enumerate(("1100", "1101"), start=1):
        runs.append(make_run(tmp_path / f"c{seed}", right, seed=seed, training={"num_train_epochs": 5.0}))
    assert compare(*runs) == 2
    assert "2 arms are regular" in capsys.readouterr().err
    trials = [{"name": run.name, "arm": run.name[0], "label": run.name[0]} for run in runs]
    grid = {"baseline": "a"}
    (tmp_path / "sweep.json").write_text(json.dumps({"grid": grid, "trials": trials}), encoding="utf-8")
    assert compare(tmp_path) == 0
    assert "3 arms, 6 runs, baseline a;" in capsys.readouterr().out
    assert compare(tmp_path, "--baseline", "c") == 0
    assert "3 arms, 6 runs, baseline c;" in capsys.readouterr().out
    # A list of values in the baseline's arm gives several; the names are those of the sweep still.
    several = [
        {**trial, "arm": "a", "label": f"a_epochs{trial['arm']}"} if trial["arm"] in "ac" else trial for trial in trials
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"grid": grid, "trials": several}), encoding="utf-8")
    assert compare(tmp_path) == 2
    assert "2 arms are regular; choose one of a_epochsa; b; a_epochsc" in capsys.readouterr().err
    assert compare(tmp_path, "--baseline", "a_epochsc") == 0
    assert "3 arms, 6 runs, baseline a_epochsc;" in capsys.readouterr().out
    (tmp_path / "sweep.json").write_text(json.dumps({"grid": grid, "trials": trials}), encoding="utf-8")
    # One is trained and waits for its evaluation; of a run that is named it is an error.
    for file in (runs[-1] / "test.jsonl", runs[-1] / "test.summary.json"):
        file.unlink()
    assert compare(tmp_path) == 0
    printed = capsys.readouterr()
    assert "3 arms, 5 runs, baseline a;" in printed.out
    assert printed.err == f"note: {runs[-1]}: not evaluated yet, skipped\n{MORE}"
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"note: {runs[-1]}: not evaluated yet, skipped\n" and "c1" in printed.out
    (runs[-1] / "run.json").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"note: {tmp_path}: 1 of 6 trials is not finished, and left out: c2\n"
    make_run(tmp_path / "again", "1101", seed=2)
    shutil.copy(tmp_path / "again" / "run.json", runs[-1])
    assert compare(runs[0], runs[-1]) == 2
    capsys.readouterr()
    for run in runs[:-1]:
        (run / "test.summary.json").unlink()
    assert compare(tmp_path) == 2
    assert "none of its runs is evaluated yet; continue the sweep by its command" in capsys.readouterr().err


def test_details_are_all_tables(runs, capsys):
    assert compare(*runs) == 0
    first = capsys.readouterr()
    assert first.err == MORE and "Δ exact" not in first.out
    assert compare(*runs, "--details") == 0
    second = capsys.readouterr()
    assert second.err == "" and "Δ exact" in second.out and "gained" in second.out
    assert compare(*runs, "--details", "--json") == 2
    assert "--details does nothing with --format json" in capsys.readouterr().err


def test_nothing_is_replaced_unasked(runs, tmp_path, capsys):
    table = tmp_path / "table.txt"
    table.write_text("mine")
    assert compare(*runs, "--output_file", table) == 2
    assert f"{table}: already exists; name another file or pass --overwrite" in capsys.readouterr().err
    assert table.read_text() == "mine"
    assert compare(*runs, "--output_file", table, "--overwrite") == 0
    assert table.read_text(encoding="utf-8").startswith(
        "at equal steps, no arm is shown to be better than regular in right answers\n(exact match); no difference of"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--baseline", "other"], "--baseline: no arm 'other'; choose one of regular; step-jepa"),
        (["--evaluation", "best"], "holds no finished evaluation 'best' (there is test)"),
        (["--overwrite"], "--overwrite does nothing without --output_file"),
        (["--output_file", "t.svg", "--plot", "./t.svg"], "t.svg: is both --output_file and --plot; name another"),
        (["nowhere"], "nowhere: is no run folder"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(flags, words, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert compare(*runs, *flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
