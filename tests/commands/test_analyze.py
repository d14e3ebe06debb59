"""``stepjepa analyze`` from the command line, on tiny trained models."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from stepjepa.analysis import run as analysis_run
from stepjepa.analysis.files import Analysis, load, output_files
from stepjepa.analysis.run import choose_configs, model_names
from stepjepa.analysis.settings import AnalysisSettings
from stepjepa.analysis.similarity import compare_views, similarity_config
from stepjepa.cli import main
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.files import write_jsonl
from stepjepa.models.loading import load_for_inference


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    """Twelve records of two to four steps, in three groups, with system prompts of their own."""
    path = tmp_path_factory.mktemp("data") / "test.jsonl"
    answers = ["\n\n".join([f"{n}+{n}={2 * n}", *["So"] * (n % 3), f"#### {2 * n}"]) for n in range(12)]
    records = [tiny.make_record("Add.", f"What is {n}+{n}?", answer) for n, answer in enumerate(answers)]
    write_jsonl(path, ({"messages": list(record.messages), "group": n // 4} for n, record in enumerate(records)))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any, trained_tokenizer: Any, data: Path) -> dict[str, Path]:
    """A regular, an LLM-JEPA and a Step-JEPA run."""
    folder = tmp_path_factory.mktemp("runs")
    tiny.make_model("llama").save_pretrained(folder / "base")
    trained_tokenizer.save_pretrained(folder / "base")
    shared = ["--train_file", data, "--model_name", folder / "base", "--use_cpu", "--max_steps", 2]
    shared += ["--save_strategy", "no"]
    flags = {
        "regular": ["--regular"],
        "llm": ["--predictors", 2, "--layout", "branched"],
        "step": ["--step_jepa", "--layout", "inplace", "--pairs", "all"],
    }
    for name, own in flags.items():
        assert main(list(map(str, ["train", *shared, "--output_dir", folder / name, *own]))) == 0
    return {"base": folder / "base", **{name: folder / name for name in flags}}


def analyze(*flags: object) -> int:
    return main(["analyze", *map(str, flags)])


def analysed(path: Path, data: Path, out: Path, *flags: object) -> Analysis:
    """An analysis of one model, as it was written."""
    assert analyze("--model_path", path, "--test_file", data, "--output_dir", out, *PCA, *flags) == 0
    return load(out)


PCA = ("--projections", "pca")


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis_run, "write_figures", lambda analysis, folder: [])


@pytest.mark.parametrize(("name", "views"), [("llm", "llm-jepa"), ("step", "step-jepa"), ("regular", "llm-jepa")])
def test_the_numbers_are_those_of_evaluate(
    name: str, views: str, runs: dict[str, Path], data: Path, tmp_path: Path, capsys: Any
) -> None:
    assert analyze("--model_path", runs[name], "--test_file", data, "--output_dir", tmp_path / "out", *PCA) == 0
    model, tokenizer = load_for_inference(runs[name])
    slow = compare_views(model, tokenizer, read_records(data), similarity_config(runs[name], views)).totals
    numbers = load(tmp_path / "out").models[0].numbers
    for kind in ("matched", "shuffled"):
        assert numbers[kind]["mean"] == pytest.approx(slow.pop(f"{kind}_similarity"), abs=1e-6)
    assert len(slow) > 4
    assert {key: numbers[key] for key in slow} == pytest.approx(slow, rel=1e-5)
    said = capsys.readouterr().out
    assert f"{name}: {views} views, source " in said
    assert f"| {numbers['matched']['mean']:.3f} " in said
    assert "some linear map fits them without error" in said
    for file in output_files(tmp_path / "out"):
        assert file.stat().st_size > 500
        assert str(file) in said


@pytest.mark.usefixtures("without_pictures")
def test_models_stand_side_by_side_on_the_same_pairs(
    runs: dict[str, Path], data: Path, tmp_path: Path, capsys: Any
) -> None:
    flags = ["--test_file", data, "--output_dir", tmp_path, *PCA, "--labels", "before, after"]
    assert analyze("--model_path", runs["regular"], runs["step"], *flags) == 0
    found = load(tmp_path)
    assert [model.name for model in found.models] == ["before", "after"]
    for model in found.models:
        # Each where it was trained to be read; separators and pairs of the one that was trained on steps.
        assert (model.config["mode"], model.config["pairs"]) == ("step-jepa", "all")
        assert model.numbers["pairs"] == 12 + 4 + 8
    assert [model.config["predictors"] for model in found.models] == [0, 2]
    assert np.array_equal(found.models[0].arrays["record"], found.models[1].arrays["record"])
    assert not np.allclose(found.models[0].arrays["source"], found.models[1].arrays["source"])
    table = capsys.readouterr().out
    assert "before: step-jepa views, source step read at its own end, target next step" in table
    assert "after: step-jepa views, source step read behind 2 predictor tokens" in table
    assert found.classes == ("step", "next step")


@pytest.mark.usefixtures("without_pictures")
def test_steps_are_coloured_by_number(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    found = analysed(runs["llm"], data, tmp_path, "--t_sne_type", "steps", "--views", "step-jepa")
    assert found.classes == ("step 1", "step 2", "step 3", "step 4")
    (model,) = found.models
    # 12 records, 8 of them with a third step, 4 with a fourth; the last is never a source, the first never a target.
    counts = [
        [int(((model.arrays["classes"] == step) & (model.arrays["is_target"] == target)).sum()) for step in range(4)]
        for target in (False, True)
    ]
    assert counts == [[12, 8, 4, 0], [0, 12, 8, 4]]


@pytest.mark.usefixtures("without_pictures")
def test_answers_of_a_sample_are_right_or_wrong(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    predictions = tmp_path / "p.jsonl"
    # In another order than the records.
    write_jsonl(predictions, ({"index": n, "scores": {"exact": n % 2 == 0}} for n in reversed(range(12))))
    flags = ["--t_sne_type", "answers", "--predictions", predictions, "--score", "exact", "--max_examples", 7]
    found = analysed(runs["llm"], data, tmp_path / "out", *flags)
    arrays = found.models[0].arrays
    assert found.classes == ("right", "wrong")
    assert len(arrays["record"]) == 7
    assert arrays["record"].tolist() == sorted(set(arrays["record"].tolist())) != list(range(7))
    assert arrays["classes"].tolist() == [n % 2 for n in arrays["record"]]


@pytest.mark.usefixtures("without_pictures")
def test_groups_of_paraphrases_are_coloured_and_measured(
    runs: dict[str, Path], data: Path, tmp_path: Path, capsys: Any
) -> None:
    found = analysed(runs["llm"], data, tmp_path, "--t_sne_type", "paraphrase")
    assert found.classes == ("group 0", "group 1", "group 2")
    model = found.models[0]
    assert model.arrays["classes"].tolist() == [n // 4 for n in range(12)]
    unit = model.arrays["source"] / np.linalg.norm(model.arrays["source"], axis=1, keepdims=True)
    within = [unit[i] @ unit[j] for i, j in combinations(range(12), 2) if i // 4 == j // 4]
    between = [unit[i] @ unit[j] for i, j in combinations(range(12), 2) if i // 4 != j // 4]
    assert model.numbers["groups"]["within"] == pytest.approx(np.mean(within), abs=1e-5)
    assert model.numbers["groups"]["between"] == pytest.approx(np.mean(between), abs=1e-5)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "cosine within groups (3 groups)" in line]
    assert row.split("|")[2].strip() == f"{np.mean(within):.3f}"


@pytest.mark.usefixtures("without_pictures")
def test_any_layer_without_predictors_of_a_model_without_a_run(
    runs: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    flags = ["--layer", 1, "--pooling", "mean"]
    base = analysed(runs["base"], data, tmp_path / "base", *flags).models[0].config
    assert (base["mode"], base["predictors"]) == ("llm-jepa", 0)
    bare = analysed(runs["llm"], data, tmp_path / "bare", *flags, "--no_predictors").models[0]
    assert (bare.config["predictors"], bare.config["layout"]) == (0, "branched")
    trained = analysed(runs["llm"], data, tmp_path / "trained", *flags).models[0]
    assert trained.config["predictors"] == 2
    assert np.allclose(trained.arrays["target"], bare.arrays["target"], atol=1e-5)
    assert not np.allclose(trained.arrays["source"], bare.arrays["source"], atol=1e-2)


@pytest.mark.usefixtures("without_pictures")
def test_the_system_prompt_is_that_of_training(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    for line in lines:
        line["messages"][0]["content"] = "Never mind"
    write_jsonl(other, lines)
    sources = [
        analysed(runs["llm"], file, tmp_path / str(number), *flags).models[0].arrays["source"]
        for number, (file, *flags) in enumerate(([data], [other], [other, "--use_test_prompts"]))
    ]
    assert np.array_equal(sources[0], sources[1])
    assert not np.allclose(sources[0], sources[2], atol=1e-2)


def test_pictures_are_drawn_again_without_a_model(
    runs: dict[str, Path], data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    copy = tmp_path / "model"
    shutil.copytree(runs["llm"], copy)
    assert analyze("--model_path", copy, "--test_file", data, "--output_dir", out) == 0
    shutil.rmtree(copy)
    *kept, png, svg, other_png, other_svg = output_files(out)
    pictures = [png, svg, other_png, other_svg]
    before, data_before = ([file.read_bytes() for file in files] for files in (pictures, kept))
    for file in pictures:
        file.unlink()
    code = (
        "import sys; from stepjepa.cli import main; c = main(sys.argv[1:]); sys.exit(c or 3 * ('torch' in sys.modules))"
    )
    again = [sys.executable, "-c", code, "analyze", "--redraw", str(out)]
    done = subprocess.run(again, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [file.read_bytes() for file in pictures] == before
    assert analyze("--redraw", out, "--labels", "another") == 0
    assert png.read_bytes() != before[0]
    assert [file.read_bytes() for file in kept] == data_before
    for flags, message in (
        (["--labels", "a,b"], "--labels: expected 1 names, got 2"),
        (["--layer", 0], "--redraw needs no --layer; leave it out"),
        (["--no_predictors"], "--redraw needs no --no_predictors; leave it out"),
    ):
        assert analyze("--redraw", out, *flags) == 2
        assert message in capsys.readouterr().err
    assert analyze("--redraw", tmp_path) == 2
    assert "holds no analysis" in capsys.readouterr().err


def test_an_earlier_analysis_is_kept(runs: dict[str, Path], data: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ["--model_path", runs["llm"], "--test_file", data, "--output_dir", tmp_path, *PCA]
    assert analyze(*flags) == 0
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before) == 6
    assert analyze(*flags, "--layer", 0) == 2
    assert "is there already; name another --output_dir or pass --overwrite" in capsys.readouterr().err
    # An analysis that fails leaves everything as it was.
    assert analyze(*flags, "--layer", 9, "--overwrite") == 2
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert analyze(*flags, "--layer", 0, "--overwrite") == 0
    assert (tmp_path / "embeddings.npz").read_bytes() != before[tmp_path / "embeddings.npz"]


ERRORS: list[tuple[list[str], str]] = [
    (["--model_path", "{llm}", "--layer", "3"], "--layer: expected -3 to 2 for a model of 2 layers, got 3"),
    (
        ["--model_path", "{llm}", "--views", "step-jepa", "--step_separator", "@@"],
        "none of the 12 records has a pair of step-jepa views",
    ),
    (["--model_path", "{llm}", "--max_examples", "1"], "tsne needs 4 points or more, and there are 2"),
    (["--model_path", "{llm}", "{step}"], "trained on different views (llm-jepa, step-jepa); pass --views"),
    (["--model_path", "{llm}", "--t_sne_type", "steps"], "not of llm-jepa; pass --views step-jepa"),
    (["--model_path", "{llm}", "--t_sne_type", "answers"], "expected 1 files after --predictions, got 0"),
    (["--model_path", "{llm}", "--score", "exact"], "--score does nothing without --t_sne_type answers"),
    (["--model_path", "{llm}", "--labels", "a,b"], "--labels: expected 1 names, got 2"),
    (["--model_path", "{llm}", "{base}", "--labels", "a,a"], "--labels: two names are equal"),
    ([], "--model_path is missing; name it, or pass --redraw DIR"),
    (["--redraw", "{llm}"], "--redraw needs no --test_file"),
]


@pytest.mark.parametrize(("flags", "message"), ERRORS, ids=lambda value: str(value)[-60:])
def test_errors_are_one_line(
    flags: list[str], message: str, runs: dict[str, Path], data: Path, tmp_path: Path, capsys: Any
) -> None:
    filled = [flag.format(**runs) for flag in flags]
    assert analyze(*filled, "--test_file", data, "--output_dir", tmp_path / "out") == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_folders_of_one_name_are_told_apart() -> None:
    settings = AnalysisSettings(["runs/a/run", "runs/b/run"], "t.jsonl", "out")
    assert model_names(settings) == ["a/run", "b/run"]
    with pytest.raises(UserError, match="--model_path names a model twice"):
        model_names(replace(settings, model_path=["run", "run"]))


def test_runs_that_paired_differently_need_a_word(runs: dict[str, Path], tmp_path: Path) -> None:
    run = json.loads((runs["step"] / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**run, "jepa": {**run["jepa"], "pairs": "first"}}))
    settings = AnalysisSettings([str(runs["step"]), str(tmp_path)], "t.jsonl", "out")
    with pytest.raises(UserError, match=r"trained with different pairs \(all, first\); pass --pairs"):
        choose_configs(settings)
    assert [config.pairs for config in choose_configs(replace(settings, pairs="first"))] == ["first", "first"]
