"""Similarity of a trained model's views, and runs side by side in one table."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tiny
from slow_trees import separately
from stepjepa.analysis.similarity import compare_views, similarity_config, similarity_quantiles, trained_objective
from stepjepa.batch.collate import Item
from stepjepa.cli import main
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.experiments.tables import report
from stepjepa.files import write_jsonl


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any, trained_tokenizer: Any) -> dict[str, Path]:
    """A regular and a Step-JEPA run on the same records, each evaluated on them."""
    folder = tmp_path_factory.mktemp("runs")
    tiny.make_model("llama").save_pretrained(folder / "base")
    trained_tokenizer.save_pretrained(folder / "base")
    write_jsonl(folder / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    shared = ["--train_file", folder / "data.jsonl", "--model_name", folder / "base", "--use_cpu", "--max_steps", "2"]
    found = {}
    for name, flags in {"regular": ["--regular"], "step": ["--step_jepa", "--layout", "inplace"]}.items():
        run = folder / name
        assert main(list(map(str, ["train", *shared, "--output_dir", run, "--save_strategy", "no", *flags]))) == 0
        evaluate = ["evaluate", "--model_path", run, "--test_file", folder / "data.jsonl", "--task", "generic"]
        evaluate += ["--output_file", run / "test.jsonl", "--max_new_tokens", 5, "--similarity", "step-jepa"]
        assert main(list(map(str, evaluate))) == 0
        found[name] = run
    return found


@pytest.mark.parametrize("batch_size", [1, 16])
def test_similarity_is_that_of_separate_passes(batch_size: int, tiny_tokenizer: Any) -> None:
    model, records = tiny.make_model("llama"), tiny.records()
    config = JepaConfig(mode="step-jepa", predictors=3, pairs="all")
    made = tiny.tokenized(tiny_tokenizer, config, records)
    collate = tiny.collator(tiny_tokenizer, config)
    with torch.no_grad():
        slow = separately(model, [collate.sequences(Item(record)) for record in made])
    owners = [index for index, record in enumerate(made) for _ in record.pairs]
    cosines = torch.stack([torch.stack([F.cosine_similarity(s, t, dim=0) for t in slow.target]) for s in slow.source])
    found = compare_views(model, tiny_tokenizer, records, config, batch_size=batch_size)
    count = len(owners)
    assert found.totals["pairs"] == count == 4
    assert found.totals["matched_similarity"] == pytest.approx(float(cosines.diag().mean()), abs=1e-5)
    off = (cosines.sum() - cosines.diag().sum()) / (count * (count - 1))
    assert found.totals["shuffled_similarity"] == pytest.approx(float(off), abs=1e-5)
    # One number for each record: the mean of its three pairs, its one pair, none.
    assert owners == [0, 0, 0, 1]
    expected = [float(cosines.diag()[:3].mean()), float(cosines.diag()[3])]
    assert found.per_record[:2] == pytest.approx(expected, abs=1e-5)
    assert found.per_record[2:] == [None]


def test_quantiles() -> None:
    values = [number / 10 for number in range(11)]
    found = similarity_quantiles([None, *reversed(values), None])
    assert (found["n"], found["mean"], found["std"]) == (11, pytest.approx(0.5), pytest.approx(0.1**0.5))
    assert found["quantiles"] == pytest.approx({"0.1": 0.1, "0.2": 0.2, "0.5": 0.5, "0.8": 0.8, "0.9": 0.9})
    assert similarity_quantiles([0.25])["std"] == 0
    assert similarity_quantiles([None]) == similarity_quantiles([]) == {"n": 0}


def test_a_model_is_read_where_it_was_trained_to_be_read(runs: dict[str, Path], tmp_path: Path) -> None:
    step = similarity_config(runs["step"], "step-jepa")
    assert (step.mode, step.layout, step.predictors) == ("step-jepa", "branched", 2)
    assert similarity_config(runs["regular"], "step-jepa").predictors == 0
    other = similarity_config(runs["step"], "llm-jepa")
    assert (other.mode, other.layout, other.predictors) == ("llm-jepa", "separate", 0)
    with pytest.raises(UserError, match="no run folder"):
        similarity_config(tmp_path, "step-jepa")
    # A checkpoint is read as the run that it lies in, a folder of any other name is not.
    for name, known in (("checkpoint-2", True), ("other", False)):
        (runs["step"] / name).mkdir()
        objective = trained_objective(runs["step"] / name)
        assert (objective is not None) == known
    assert similarity_config(runs["step"] / "checkpoint-2", "step-jepa") == step


def test_right_and_wrong_answers_are_told_apart(runs: dict[str, Path]) -> None:
    lines = [json.loads(line) for line in (runs["step"] / "test.jsonl").read_text().splitlines()]
    found = json.loads((runs["step"] / "test.summary.json").read_text())["similarity"]
    measured = [line["similarity"] for line in lines if line["similarity"] is not None]
    # Tiny models know nothing, so all that has a pair of steps is on one side.
    assert {line["error"] is None for line in lines} == {False}
    assert len(measured) == found["wrong"]["n"] == found["pairs"] < len(lines)
    assert found["wrong"]["mean"] == pytest.approx(sum(measured) / len(measured))
    assert found["wrong"]["mean"] == pytest.approx(found["matched_similarity"], abs=1e-6)
    assert found["right"] == {"n": 0}


def test_table(runs: dict[str, Path], capsys: Any) -> None:
    assert main(["report", *map(str, runs.values())]) == 0
    table = capsys.readouterr().out.strip().splitlines()
    assert table[0].startswith("best by exact (prefix): ")
    assert max(map(len, table)) <= 80
    assert main(["report", "--json", *map(str, runs.values())]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in rows] == ["regular", "step"]
    for row, run in zip(rows, runs.values(), strict=True):
        summary = json.loads((run / "test.summary.json").read_text())
        results = json.loads((run / "run.json").read_text())["results"]
        assert row["accuracy"] == summary["scores"]["exact"]["mean"]
        assert row["score"] == "exact (prefix)"
        assert row["lenient"] == summary["scores"]["prefix"]["mean"]
        assert row["matched"] == summary["similarity"]["matched_similarity"] != row["shuffled"]
        assert (row["tokens"], row["seconds"]) == (results["tokens"], results["train_seconds"])
    assert rows[1]["tokens"] > rows[0]["tokens"] > 0


def test_what_can_not_stand_in_one_table(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run folder \(no run.json"):
        report([tmp_path])
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "run.json").write_text((runs["step"] / "run.json").read_text())
    with pytest.raises(UserError, match="holds no finished evaluation"):
        report([copy])
    summary = json.loads((runs["step"] / "test.summary.json").read_text())
    (copy / "t.summary.json").write_text(json.dumps({**summary, "test_fingerprint": "another"}))
    (copy / "t.jsonl").write_text((runs["step"] / "test.jsonl").read_text())
    with pytest.raises(UserError, match="the runs differ in test file"):
        report([runs["step"], copy])
    run = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**run, "status": "running"}))
    with pytest.raises(UserError, match="not finished"):
        report([copy])
