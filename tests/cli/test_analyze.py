"""``stepjepa analyze`` from the command line, on tiny trained models."""

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.data.sources import read_records
from stepjepa.evaluation.embeddings import similarity_config, similarity_totals
from stepjepa.evaluation.run import pair_embedder
from stepjepa.inspection import analysis
from stepjepa.inspection.analysis import output_files
from stepjepa.models.loading import load_for_inference


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    """Twelve records of two to four steps, in three groups, with system prompts of their own."""
    path = tmp_path_factory.mktemp("data") / "test.jsonl"
    # No two steps are equal: which of two equal targets is the nearest would be a matter of rounding.
    between = [[f"So {place} of {n}" for place in range(n % 3)] for n in range(12)]
    answers = ["\n\n".join([f"{n}+{n}={2 * n}", *between[n], f"#### {2 * n}"]) for n in range(12)]
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


@pytest.fixture
def blank_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at is not the picture, whose drawing takes most of an analysis."""
    monkeypatch.setattr(analysis, "write_figure", lambda _, stream, form: stream.write(b"blank"))


def fill_the_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def analyze(*flags: object) -> int:
    return main(["analyze", *map(str, flags)])


def analysed(paths: Sequence[Path], data: Path, out: Path, *flags: object) -> tuple[list[dict[str, Any]], Any]:
    """The models of an analysis, and their embeddings, as they were written."""
    assert analyze("--model_path", *paths, "--test_file", data, "--output_dir", out, *flags) == 0
    with np.load(out / "embeddings.npz") as arrays:
        return json.loads((out / "analysis.json").read_text())["models"], dict(arrays)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "views"), [("llm", "llm-jepa"), ("step", "step-jepa")])
def test_the_numbers_are_those_of_evaluate(
    name: str, views: str, runs: dict[str, Path], data: Path, tmp_path: Path, capsys: Any
) -> None:
    ((model,), _) = analysed([runs[name]], data, tmp_path / "out")
    embedder = pair_embedder(*load_for_inference(runs[name]), similarity_config(runs[name], views))
    slow = similarity_totals(embedder(read_records(data)))
    numbers = model["numbers"]
    for kind in ("matched", "shuffled"):
        assert numbers[kind]["mean"] == pytest.approx(slow.pop(f"{kind}_similarity"), abs=1e-6)
    assert len(slow) > 4
    assert {key: numbers[key] for key in slow} == pytest.approx(slow, rel=1e-5)
    output = capsys.readouterr().out
    source, target = ("question", "answer") if name == "llm" else ("step", "next step")
    assert f"{name}: {views} views, source {source} " in output and f", target {target}" in output
    assert re.search(r"(?m)^matched pairs +\d+$", output) and "matched n " not in output
    assert f"{numbers['matched']['mean']:.4g}" in output
    assert "are too few to tell a linear map" in output
    for file in output_files(tmp_path / "out"):
        assert file.stat().st_size > 500
        assert str(file) in output


@pytest.mark.slow
def test_models_stand_side_by_side_on_the_same_pairs(
    runs: dict[str, Path], data: Path, tmp_path: Path, capsys: Any
) -> None:
    models, arrays = analysed([runs["regular"], runs["step"]], data, tmp_path)
    assert [model["model_path"] for model in models] == [str(runs["regular"]), str(runs["step"])]
    for model in models:
        # Each where it was trained to be read; separators and pairs of the one that was trained on steps.
        assert (model["config"]["mode"], model["config"]["pairs"]) == ("step-jepa", "all")
        assert model["numbers"]["pairs"] == 12 + 4 + 8
    assert [model["config"]["predictors"] for model in models] == [0, 2]
    assert np.array_equal(arrays["0/record"], arrays["1/record"])
    assert not np.allclose(arrays["0/source"], arrays["1/source"])
    table = capsys.readouterr().out
    assert "regular: step-jepa views, source step read behind 0 predictor tokens, target next step" in table
    assert "step: step-jepa views, source step read behind 2 predictor tokens" in table


@pytest.mark.usefixtures("blank_picture")
def test_any_layer_of_a_model_without_a_run(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    flags = ["--layer", 1, "--pooling", "mean"]
    ((base,), _) = analysed([runs["base"]], data, tmp_path / "base", *flags)
    assert (base["config"]["mode"], base["config"]["predictors"]) == ("llm-jepa", 0)
    ((trained,), result) = analysed([runs["llm"]], data, tmp_path / "trained", *flags)
    assert [trained["config"][name] for name in ("predictors", "jepa_layer", "pooling")] == [2, 1, "mean"]
    _, last = analysed([runs["llm"]], data, tmp_path / "last")
    assert not np.allclose(result["0/source"], last["0/source"], atol=1e-2)


@pytest.mark.usefixtures("blank_picture")
def test_the_system_prompt_is_that_of_training(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    for line in lines:
        line["messages"][0]["content"] = "Never mind"
    write_jsonl(other, lines)
    sources = [
        analysed([runs["llm"]], file, tmp_path / str(number), *flags)[1]["0/source"]
        for number, (file, *flags) in enumerate(([data], [other], [other, "--use_test_prompts"]))
    ]
    assert np.array_equal(sources[0], sources[1])
    assert not np.allclose(sources[0], sources[2], atol=1e-2)


def test_a_folder_that_can_not_be_made_is_named_before_any_record_is_read(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert analyze("--model_path", "nowhere", "--test_file", "none", "--output_dir", tmp_path / "file" / "a") == 2
    assert f"can't be made, since {tmp_path}/file is a file; name another place" in capsys.readouterr().err


@pytest.mark.usefixtures("blank_picture")
def test_an_earlier_analysis_is_kept(
    runs: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    flags = ["--model_path", runs["llm"], "--test_file", data, "--output_dir", tmp_path]
    assert analyze(*flags) == 0
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before) == 3
    assert analyze(*flags, "--layer", 1) == 2
    assert "already exists; name another --output_dir or pass --overwrite" in capsys.readouterr().err
    # Another process has written it meanwhile.
    with monkeypatch.context() as context:
        for file in before:
            file.rename(file.with_suffix(".moved"))
        context.setattr(
            analysis, "fingerprint", lambda _: [file.with_suffix(".moved").rename(file) for file in before] and "0"
        )
        assert analyze(*flags) == 2
        assert "already exists; name another --output_dir" in capsys.readouterr().err
    # An analysis that fails leaves everything as it was.
    assert analyze(*flags, "--layer", 9, "--overwrite") == 2
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    with monkeypatch.context() as context:
        context.setattr(analysis, "write_figure", fill_the_disk)
        assert analyze(*flags, "--layer", 1, "--overwrite") == 2
    assert f"{tmp_path}/projection.png: No space left on device; free some space or" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert analyze(*flags, "--layer", 1, "--overwrite") == 0
    assert (tmp_path / "embeddings.npz").read_bytes() != before[tmp_path / "embeddings.npz"]


ERRORS: list[tuple[list[str], str]] = [
    (["--model_path", "{llm}", "--layer", "3"], "--layer: expected -3 to 2 for a model of 2 layers, got 3"),
    (
        ["--model_path", "{llm}", "--layer", "0"],
        "--layer: expected -1, or 1 or more, got 0; that is the embedding of a predictor token",
    ),
    (["--model_path", "{llm}", "--max_examples", "1"], "t-SNE needs 4 points or more, and there are 2"),
    (["--model_path", "{llm}", "{step}"], "trained with different views ('llm-jepa', 'step-jepa'); pass --views"),
    (["--model_path", "{llm}", "--t_sne_type", "steps"], "not of llm-jepa; pass --views step-jepa"),
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


def test_columns_of_any_name_are_analysed(
    runs: dict[str, Path], data: Path, tmp_path: Path, blank_picture: None
) -> None:
    table = tmp_path / "table.jsonl"
    write_jsonl(
        table, ({"ask": record.messages[-2]["content"], "said": record.answer} for record in read_records(data))
    )
    of_table, _ = analysed([runs["llm"]], table, tmp_path / "table", "--columns", "ask", "said")
    of_chats, _ = analysed([runs["llm"]], data, tmp_path / "chats")
    assert of_table[0]["numbers"]["pairs"] == of_chats[0]["numbers"]["pairs"] == 12
