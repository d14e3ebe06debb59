"""Where the memory of a step goes: the kinds of tensors, the table, and one real run."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
memory = importlib.import_module("bench_memory")
profile_memory = importlib.import_module("profile_memory")
report = importlib.import_module("report")
table = importlib.import_module("bench_memory_table")


def test_tensors_are_told_apart_by_shape():
    model = nn.Sequential(nn.Embedding(101, 7), nn.Linear(7, 11))
    kind = memory.kind_of(model, 101)
    shapes = {
        (101, 7): memory.GRADIENTS,
        (11, 7): memory.GRADIENTS,
        (3, 5, 101): memory.LOGITS,
        # Some columns of the logits at a time, still more than any layer gives.
        (15, 13): memory.LOGITS,
        (101,): memory.ACTIVATIONS,
        (2, 1, 5, 5): memory.MASKS,
        (2, 5, 11): memory.ACTIVATIONS,
    }
    for shape, expected in shapes.items():
        assert kind(torch.zeros(shape)) == expected, shape
    assert kind(torch.zeros(2, 3, dtype=torch.bool)) == memory.MASKS


def test_shares_are_those_of_trl():
    def found(peak):
        return {
            "peak": peak,
            "before": 100.0,
            "weights": 5.0,
            "optimizer": 10.0,
            "step": 50.0,
            "kinds": {"logits": 20.0},
        }

    results = {
        "settings": {"batch_size": 16},
        "memory": {"synth": {"regular": found(150.0), "trl padded 16": found(200.0)}},
    }
    lines = table.markdown(results).splitlines()
    assert lines[2:] == [
        "| synth | regular | 75 | 50 | 2.5 | 5 | 25 | 10 |",
        "| synth | trl padded 16 | 100 | 50 | 2.5 | 5 | 25 | 10 |",
    ]


def test_memory_from_data_to_table(tmp_path, capsys, monkeypatch):
    output = tmp_path / "memory.json"
    words = ["--suite", "synth", "--arm", "llm-jepa separate, forest", "--train_file", "generated", "--records", "24"]
    words += ["--batch_size", "3", "--steps", "2", "--threads", "1", "--output", str(output)]
    # TRL need not be there.
    chosen = profile_memory.chosen_arms
    monkeypatch.setattr(profile_memory, "chosen_arms", lambda *args: [arm for arm in chosen(*args) if not arm.is_trl])
    assert profile_memory.main(words) == 0
    results = json.loads(output.read_text(encoding="utf-8"))
    regular, views = (results["memory"]["synth"][name] for name in ("regular", "llm-jepa separate, forest"))
    assert regular["optimizer"] == pytest.approx(2 * regular["weights"])
    assert views["kinds"]["activations"] > regular["kinds"]["activations"] > 0
    for found in (regular, views):
        assert found["peak"] >= found["before"] > found["weights"] > 0
        assert found["step"] >= sum(found["kinds"].values())
    assert "| synth | regular | 100 |" in report.text_of(results, output.name)


def test_the_page_is_what_the_results_give():
    page = report.PAGE.read_text(encoding="utf-8")
    for file in (ROOT / "benchmarks" / "results").glob("*-memory*.json"):
        assert report.text_of(report.read_results(file), file.name) in page
